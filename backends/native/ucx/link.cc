#include "link.h"

#include <poll.h>

#include <algorithm>
#include <iterator>
#include <sstream>
#include <utility>

#include "../core/notifier.h"
#include "../core/synchronization.h"

namespace hvkeras::ucx {

namespace {

constexpr unsigned kMajor = 1, kMinor = 12;    // the UCP API version that api.h declares
constexpr int kMessages = Link::kResults + 1;  // streams of messages, in addition to those of Link
constexpr int kHandshakes = kMessages + 1;
constexpr uint64_t kAnyHostMask = ~(uint64_t{0xffff} << 16), kFullTagMask = ~uint64_t{0};
constexpr int64_t kCloseMicros = 2'000'000;     // to flush and close the endpoints
constexpr int64_t kAbortMicros = 200'000;       // for canceled requests to finish
constexpr int64_t kMessageMicros = 10'000'000;  // for the rest of a message that has begun to arrive

constexpr size_t kMaxMessageBytes = 1024 * 1024;  // far more than a small allreduce needs

const RequestParameters kDefaultParameters{};

}  // namespace

UcxLink::UcxLink(const Api& api, const std::string& settings, size_t hosts) : api_(api) {
  try {
    open(settings, hosts);
  } catch (...) {
    close();
    throw;
  }
}

UcxLink::~UcxLink() { close(); }

void UcxLink::open(const std::string& settings, size_t hosts) {
  Config* config = nullptr;
  check(api_.config_read(nullptr, nullptr, &config), "read its configuration");
  std::istringstream lines(settings);
  for (std::string line; std::getline(lines, line);) {
    const size_t equals = line.find('=');
    const std::string name = line.substr(0, equals), value = line.substr(equals + 1);
    const UcsStatus status = api_.config_modify(config, name.c_str(), value.c_str());
    if (status == kOk || status == kNoElement) continue;  // settings that this UCX version does not have are skipped
    api_.config_release(config);
    check(status, ("set " + line).c_str());
  }
  ContextParameters parameters{};
  parameters.mask = kHasFeatures | kHasEstimatedEndpoints;
  parameters.features = kTags | kWakeup;
  parameters.estimated_endpoints = hosts;
  const UcsStatus status = api_.init(kMajor, kMinor, &parameters, config, &context_);
  api_.config_release(config);
  check(status, "initialize");
  const WorkerParameters worker_parameters{kHasThreadMode, kOneThreadAtATime};
  check(api_.worker_create(context_, &worker_parameters, &worker_), "create a worker");
  check(api_.worker_get_efd(worker_, &descriptor_), "get the worker's event descriptor");
  Address* address = nullptr;
  size_t bytes = 0;
  check(api_.worker_get_address(worker_, &address, &bytes), "get the worker's address");
  address_.assign(reinterpret_cast<const char*>(address), bytes);
  api_.worker_release_address(worker_, address);
}

void UcxLink::connect(int host, const std::vector<std::string>& addresses, const std::vector<std::string>& names,
                      uint32_t link_id, double timeout) {
  host_ = host;
  link_id_ = link_id;
  peers_.resize(addresses.size());  // never resized again: UCX has pointers to the elements
  for (size_t index = 0; index < addresses.size(); ++index) {
    Peer& peer = peers_[index];
    peer.name = names[index];
    if (static_cast<int>(index) == host) continue;
    EndpointParameters parameters{};
    parameters.mask = kHasAddress | kHasErrorMode | kHasOnError;
    parameters.address = reinterpret_cast<const Address*>(addresses[index].data());
    parameters.error_mode = kReportsPeers;
    parameters.on_error = [](void* peer, Endpoint*, UcsStatus status) { static_cast<Peer*>(peer)->status = status; };
    parameters.argument = &peer;
    check_peer(static_cast<int>(index), api_.ep_create(worker_, &parameters, &peer.endpoint));
  }
  handshake(timeout);
}

bool UcxLink::has_failed_peer() const {
  return std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.status != kOk; });
}

// Sends a byte to all other hosts, and waits for theirs, so that both directions of every connection work.
void UcxLink::handshake(double timeout) {
  std::vector<char> received(peers_.size());
  try {
    exchange_handshakes(received.data(), timeout);
  } catch (...) {
    abort();  // afterwards UCX no longer writes to `received`
    throw;
  }
}

void UcxLink::exchange_handshakes(char* received, double timeout) {
  static const char sent = 1;
  const int64_t end = microseconds_now() + static_cast<int64_t>(timeout * 1e6);
  std::vector<std::pair<int, Handle>> in_flight;
  for (int host = 0; host < static_cast<int>(peers_.size()); ++host) {
    if (host == host_) continue;
    char* const byte = received + host;
    in_flight.emplace_back(
        host, track(api_.tag_receive(worker_, byte, 1, tag(host, kHandshakes), kFullTagMask, &kDefaultParameters), host,
                    true));
    Endpoint* const endpoint = peers_[static_cast<size_t>(host)].endpoint;
    in_flight.emplace_back(
        host, track(api_.tag_send(endpoint, &sent, 1, tag(host_, kHandshakes), &kDefaultParameters), host, false));
  }
  for (const auto& [host, handle] : in_flight) {
    while (!done(handle)) {
      if (microseconds_now() > end)
        throw Failure("UCX failed to connect to " + peers_[static_cast<size_t>(host)].name + " within " +
                      std::to_string(static_cast<int>(timeout)) + " s");
      sleep(Polling::kMaxSleepMicros, -1);
      progress();
    }
  }
}

uint64_t UcxLink::tag(int from, int stream) const {
  return static_cast<uint64_t>(link_id_) << 32 | static_cast<uint64_t>(from) << 16 | static_cast<uint64_t>(stream);
}

void UcxLink::check(UcsStatus status, const char* action) const {
  if (status < kOk) throw Failure(std::string("UCX failed to ") + action + ": " + api_.status_text(status));
}

void UcxLink::check_peer(int host, UcsStatus status) const {
  if (status < kOk)
    throw Failure(
        "UCX connection to " + peers_[static_cast<size_t>(host)].name + " failed: " + api_.status_text(status),
        Code::kPeerFailed);
}

Link::Handle UcxLink::track(void* pointer, int host, bool is_receive) {
  if (is_request(pointer)) return *transfers_.insert(new Transfer{pointer, host, is_receive}).first;
  check_peer(host, status_of(pointer));
  return nullptr;
}

void UcxLink::send_message(int host, std::vector<char> message) {
  if (!is_open_) throw Failure("the connections to other hosts are closed");
  outgoing_.push_back({std::move(message), nullptr, host});
  OutgoingMessage& outgoing = outgoing_.back();
  outgoing.request = api_.tag_send(peers_[static_cast<size_t>(host)].endpoint, outgoing.message.data(),
                                   outgoing.message.size(), tag(host_, kMessages), &kDefaultParameters);
  if (is_request(outgoing.request)) return;
  const UcsStatus status = status_of(outgoing.request);
  outgoing_.pop_back();
  check_peer(host, status);
}

bool UcxLink::try_receive_message(std::vector<char>* message, int* host) {
  if (!is_open_) return false;
  TagInfo info{};
  Message* const found = api_.tag_probe(worker_, tag(0, kMessages), kAnyHostMask, 1, &info);
  if (found == nullptr) return false;
  *host = static_cast<int>(info.tag >> 16 & 0xffff);
  if (static_cast<size_t>(*host) >= peers_.size()) throw Failure("UCX received a message with an invalid host index");
  if (info.length > kMaxMessageBytes)
    throw Failure("UCX received a message of " + std::to_string(info.length) + " bytes from " +
                  peers_[static_cast<size_t>(*host)].name + ", over the limit of " + std::to_string(kMaxMessageBytes));
  message->resize(info.length);
  void* const pointer = api_.message_receive(worker_, message->data(), message->size(), found, &kDefaultParameters);
  const UcsStatus status = wait_request(pointer, kMessageMicros);
  if (status == kInProgress) {
    abandoned_.push_back(std::move(*message));
    throw Failure("UCX connection to " + peers_[static_cast<size_t>(*host)].name + " failed in the middle of a message",
                  Code::kPeerFailed);
  }
  check_peer(*host, status);
  return true;
}

Link::Handle UcxLink::send(int host, Stream stream, const void* data, size_t bytes) {
  if (!is_open_) throw Failure("the connections to other hosts are closed");
  return track(
      api_.tag_send(peers_[static_cast<size_t>(host)].endpoint, data, bytes, tag(host_, stream), &kDefaultParameters),
      host, false);
}

Link::Handle UcxLink::receive(int host, Stream stream, void* data, size_t bytes) {
  if (!is_open_) throw Failure("the connections to other hosts are closed");
  return track(api_.tag_receive(worker_, data, bytes, tag(host, stream), kFullTagMask, &kDefaultParameters), host,
               true);
}

bool UcxLink::done(Handle handle) {
  if (handle == nullptr) return true;
  auto* const transfer = static_cast<Transfer*>(handle);
  const UcsStatus status = api_.request_status(transfer->request);
  if (status == kInProgress) {
    check_peer(transfer->host, peers_[static_cast<size_t>(transfer->host)].status);
    return false;
  }
  const int host = transfer->host;
  api_.request_free(transfer->request);
  transfers_.erase(transfer);
  delete transfer;
  check_peer(host, status);
  return true;
}

void UcxLink::progress() {
  if (!is_open_) return;
  api_.worker_progress(worker_);
  // A flush cannot finish for a host that has failed or ended; operations that wait for that host report the failure.
  if (has_failed_peer()) flush_status_ = kOk;
  check(flush_status_, "flush the worker");
  for (auto outgoing = outgoing_.begin(); outgoing != outgoing_.end();) {
    const UcsStatus status = api_.request_status(outgoing->request);
    if (status == kInProgress) {
      ++outgoing;
      continue;
    }
    const int host = outgoing->host;
    api_.request_free(outgoing->request);
    outgoing = outgoing_.erase(outgoing);
    check_peer(host, status);
  }
}

bool UcxLink::all_sent() {
  if (!is_open_) return true;
  if (flush_request_ != nullptr) {
    const UcsStatus status = api_.request_status(flush_request_);
    if (status == kInProgress) return false;
    api_.request_free(flush_request_);
    flush_request_ = nullptr;
    if (status < kOk) flush_status_ = status;
  }
  // Covers what was sent since the last flush began.
  void* const pointer = api_.worker_flush(worker_, &kDefaultParameters);
  if (is_request(pointer)) {
    flush_request_ = pointer;
  } else if (status_of(pointer) < kOk) {
    flush_status_ = status_of(pointer);
  }
  return flush_request_ == nullptr && (flush_status_ == kOk || has_failed_peer()) && outgoing_.empty();
}

void UcxLink::sleep(int64_t microseconds, int notifier) {
  if (!is_open_) return;
  const UcsStatus status = api_.worker_arm(worker_);
  if (status == kBusy) return;  // there are events to process
  check(status, "arm the worker");
  pollfd descriptors[] = {{descriptor_, POLLIN, 0}, {notifier, POLLIN, 0}};
  const timespec limit{static_cast<time_t>(microseconds / 1'000'000),
                       static_cast<long>(microseconds % 1'000'000) * 1'000};
  if (ppoll(descriptors, notifier < 0 ? 1 : 2, &limit, nullptr) > 0 && descriptors[1].revents != 0) mute(notifier);
}

UcsStatus UcxLink::wait_request(void* pointer, int64_t microseconds) {
  if (!is_request(pointer)) return status_of(pointer);
  const int64_t end = microseconds_now() + microseconds;
  UcsStatus status = api_.request_status(pointer);
  while (status == kInProgress && microseconds_now() < end) {
    api_.worker_progress(worker_);
    status = api_.request_status(pointer);
  }
  api_.request_free(pointer);  // UCX releases it when it finishes
  return status;
}

void UcxLink::close_endpoints(bool force) {
  const int64_t end = microseconds_now() + (force ? kAbortMicros : kCloseMicros);
  std::vector<void*> closing;
  for (Peer& peer : peers_) {
    if (peer.endpoint == nullptr) continue;
    RequestParameters parameters{};
    parameters.mask = kHasFlags;
    parameters.flags = force || peer.status != kOk ? kForce : 0;
    closing.push_back(api_.ep_close(peer.endpoint, &parameters));
    peer.endpoint = nullptr;
  }
  for (void* const pointer : closing) wait_request(pointer, std::max<int64_t>(0, end - microseconds_now()));
}

void UcxLink::abort() {
  if (!is_open_) return;
  is_open_ = false;
  for (const Transfer* transfer : transfers_) {
    if (transfer->is_receive) api_.request_cancel(worker_, transfer->request);
  }
  close_endpoints(true);
  const int64_t end = microseconds_now() + kAbortMicros;
  for (Transfer* const transfer : transfers_) {
    wait_request(transfer->request, std::max<int64_t>(0, end - microseconds_now()));
    delete transfer;
  }
  transfers_.clear();
  if (flush_request_ != nullptr) wait_request(flush_request_, std::max<int64_t>(0, end - microseconds_now()));
  flush_request_ = nullptr;
  for (const OutgoingMessage& outgoing : outgoing_)
    wait_request(outgoing.request, std::max<int64_t>(0, end - microseconds_now()));
}

void UcxLink::close() {
  if (worker_ != nullptr && is_open_) {
    if (!peers_.empty()) wait_request(api_.worker_flush(worker_, &kDefaultParameters), kCloseMicros);
    if (transfers_.empty()) close_endpoints(false);
    abort();
  }
  if (worker_ != nullptr) api_.worker_destroy(worker_);
  if (context_ != nullptr) api_.cleanup(context_);
  worker_ = nullptr;
  context_ = nullptr;
}

}  // namespace hvkeras::ucx
