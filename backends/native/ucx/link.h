// The leaders' way to each other over UCX. Each group of ranks has a link of its own: no thread waits for another's.
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

  // Where others reach this end; bytes of UCX's own.
  const std::string& address() const { return address_; }
  // Connects to all others, which do the same at once; `host` is this one's index among them. `names` are for messages.
  // Messages of a link with another mark are not taken for this one's.
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
  // Another host's leader.
  struct Peer {
    std::string name;
    Endpoint* endpoint = nullptr;
    UcsStatus status = kOk;  // an error, once the connection is lost
  };
  struct Transfer {
    void* request;
    int host;
    bool is_receive;  // whether it is received
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
  // Progresses until a request is done, or for so long; returns what came of it, or that it is in progress.
  UcsStatus wait_request(void* pointer, int64_t microseconds);
  void handshake(double timeout);
  void exchange_handshakes(char* received, double timeout);
  bool has_failed_peer() const;
  void close_endpoints(bool force);
  void close();

  const Api& api_;
  Context* context_ = nullptr;
  Worker* worker_ = nullptr;
  int descriptor_ = -1;  // readable when there is something to progress
  std::string address_;
  uint32_t link_id_ = 0;
  int host_ = 0;
  bool is_open_ = true;
  std::vector<Peer> peers_;  // by host; this one's has no endpoint
  std::unordered_set<Transfer*> transfers_;
  std::list<OutgoingMessage> outgoing_;
  void* flush_request_ = nullptr;             // a request, while what was sent before it has not left
  UcsStatus flush_status_ = kOk;              // an error, once that cannot leave
  std::vector<std::vector<char>> abandoned_;  // memory of messages that did not end in time
};

}  // namespace hvkeras::ucx
