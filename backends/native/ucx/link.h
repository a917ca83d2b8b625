// A link between leaders over UCX. Each group of ranks has its own link (a UCP worker), so threads never contend for
// it.
#pragma once

#include <list>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "../core/link.h"
#include "api.h"

namespace hvkeras::ucx {

class UcxLink : public Link {
 public:
  // Opens this rank's end. `settings` are lines of UCX's configuration, such as "NET_DEVICES=eth0". Throws Failure.
  UcxLink(const Api& api, const std::string& settings, size_t hosts);
  ~UcxLink() override;
  UcxLink(const UcxLink&) = delete;
  UcxLink& operator=(const UcxLink&) = delete;

  // The UCP worker address, which is opaque.
  const std::string& address() const { return address_; }
  // Connects to all other hosts, which do the same at once; `host` is this host's index. `names` are for error
  // messages. `link_id` keeps messages of different links apart.
  void connect(int host, const std::vector<std::string>& addresses, const std::vector<std::string>& names,
               uint32_t link_id, double timeout);

  void send_message(int host, std::vector<char> message) override;
  bool try_receive_message(std::vector<char>* message, int* host) override;
  Handle send(int host, Stream stream, const void* data, size_t bytes) override;
  Handle receive(int host, Stream stream, void* data, size_t bytes) override;
  bool done(Handle handle) override;
  void progress() override;
  bool all_sent() override;
  void sleep(int64_t microseconds, int notifier) override;
  void abort() override;

 private:
  // The leader of another host.
  struct Peer {
    std::string name;
    Endpoint* endpoint = nullptr;
    UcsStatus status = kOk;  // an error, once the connection has failed
  };
  struct Transfer {
    void* request;
    int host;
    bool is_receive;  // false for sends
  };
  struct OutgoingMessage {
    std::vector<char> message;
    void* request;
    int host;
  };

  void open(const std::string& settings, size_t hosts);
  uint64_t tag(int from, int stream) const;
  Handle track(void* pointer, int host, bool is_receive);
  void check_peer(int host, UcsStatus status) const;
  void check(UcsStatus status, const char* action) const;
  // Makes progress until a request is done, at most this long. Returns its status, which may still be kInProgress.
  UcsStatus wait_request(void* pointer, int64_t microseconds);
  void handshake(double timeout);
  void exchange_handshakes(char* received, double timeout);
  bool has_failed_peer() const;
  void close_endpoints(bool force);
  void close();

  const Api& api_;
  Context* context_ = nullptr;
  Worker* worker_ = nullptr;
  int descriptor_ = -1;  // UCP event descriptor: readable when there is something to progress
  std::string address_;
  uint32_t link_id_ = 0;
  int host_ = 0;
  bool is_open_ = true;
  std::vector<Peer> peers_;  // by host; this host's entry has no endpoint
  std::unordered_set<Transfer*> transfers_;
  std::list<OutgoingMessage> outgoing_;
  void* flush_request_ = nullptr;             // in flight until what was sent before it has left
  UcsStatus flush_status_ = kOk;              // an error, if a flush has failed
  std::vector<std::vector<char>> abandoned_;  // buffers of messages that were not received in time
};

}  // namespace hvkeras::ucx
