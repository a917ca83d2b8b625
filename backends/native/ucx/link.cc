#include "link.h"

#include <poll.h>

#include <algorithm>
#include <iterator>
#include <sstream>
#include <utility>

#include "../core/notifier.h"
#include "../core/waiting.h"

namespace hvkeras::ucx {

namespace {

constexpr unsigned kMajor = 1, kMinor = 12;   // the interface that api.h describes
constexpr int kNotices = Link::kResults + 1;  // further streams, of messages
constexpr int kGreetings = kNotices + 1;
constexpr uint64_t kAnyHost = ~(uint64_t{0xffff} << 16), kExactly = ~uint64_t{0};
constexpr int64_t kClosing = 2'000'000;   // microseconds for all that is left to leave, and for closing
constexpr int64_t kGivingUp = 200'000;    // microseconds for what was given up to end
constexpr int64_t kMessage = 10'000'000;  // microseconds for the rest of a message whose beginning is there

constexpr size_t kLongest = 1024 * 1024;  // bytes of a message, of which even a small allreduce's part has fewer

const RequestParameters kPlain{};

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
  require(api_.config_read(nullptr, nullptr, &config), "read its configuration");
  std::istringstream lines(settings);
  for (std::string line; std::getline(lines, line);) {
    const size_t equals = line.find('=');
    const std::string name = line.substr(0, equals), value = line.substr(equals + 1);
    const UcsStatus status = api_.config_modify(config, name.c_str(), value.c_str());
    if (status == kOk || status == kNoElement) continue;  // what this UCX does not know, it does not do
    api_.config_release(config);
    require(status, ("take " + line).c_str());
  }
  ContextParameters parameters{};
  parameters.mask = kHasFeatures | kHasEstimatedEndpoints;
  parameters.features = kTags | kWakeup;
  parameters.estimated_endpoints = hosts;
  const UcsStatus status = api_.init(kMajor, kMinor, &parameters, config, &context_);
  api_.config_release(config);
  require(status, "start");
  const WorkerParameters of_worker{kHasThreadMode, kOneThreadAtATime};
  require(api_.worker_create(context_, &of_worker, &worker_), "open its transports");
  require(api_.worker_get_efd(worker_, &descriptor_), "wake up when something comes");
  Address* address = nullptr;
  size_t bytes = 0;
  require(api_.worker_get_address(worker_, &address, &bytes), "say where it is");
  address_.assign(reinterpret_cast<const char*>(address), bytes);
  api_.worker_release_address(worker_, address);
}

void UcxLink::connect(int host, const std::vector<std::string>& addresses, const std::vector<std::string>& names,
                      uint32_t mark, double timeout) {
  host_ = host;
  mark_ = mark;
  peers_.resize(addresses.size());  // never again: UCX has pointers to them
  for (size_t index = 0; index < addresses.size(); ++index) {
    Peer& peer = peers_[index];
    peer.name = names[index];
    if (static_cast<int>(index) == host) continue;
    EndpointParameters parameters{};
    parameters.mask = kHasAddress | kHasErrorMode | kHasOnError;
    parameters.address = reinterpret_cast<const Address*>(addresses[index].data());
    parameters.error_mode = kReportsPeers;
    parameters.on_error = [](void* lost, Endpoint*, UcsStatus status) { static_cast<Peer*>(lost)->status = status; };
    parameters.argument = &peer;
    require_peer(static_cast<int>(index), api_.ep_create(worker_, &parameters, &peer.endpoint));
  }
  greet(timeout);
}

bool UcxLink::has_lost_peers() const {
  return std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) { return peer.status != kOk; });
}

// Sends all others a word, and waits for theirs: then both directions of every connection are there.
void UcxLink::greet(double timeout) {
  std::vector<char> received(peers_.size());
  try {
    await_greetings(received.data(), timeout);
  } catch (...) {
    give_up();  // nothing comes into this memory any more
    throw;
  }
}

void UcxLink::await_greetings(char* received, double timeout) {
  static const char sent = 1;
  const int64_t end = microseconds_now() + static_cast<int64_t>(timeout * 1e6);
  std::vector<std::pair<int, Ticket>> under_way;
  for (int host = 0; host < static_cast<int>(peers_.size()); ++host) {
    if (host == host_) continue;
    char* const greeting = received + host;
    under_way.emplace_back(
        host, started(api_.tag_receive(worker_, greeting, 1, tag(host, kGreetings), kExactly, &kPlain), host, true));
    Endpoint* const endpoint = peers_[static_cast<size_t>(host)].endpoint;
    under_way.emplace_back(host,
                           started(api_.tag_send(endpoint, &sent, 1, tag(host_, kGreetings), &kPlain), host, false));
  }
  for (const auto& [host, ticket] : under_way) {
    while (!done(ticket)) {
      if (microseconds_now() > end)
        throw Failure("UCX does not reach " + peers_[static_cast<size_t>(host)].name + " within " +
                      std::to_string(static_cast<int>(timeout)) + " s");
      sleep(Polling::kLongestSleep, -1);
      progress();
    }
  }
}

uint64_t UcxLink::tag(int from, int stream) const {
  return static_cast<uint64_t>(mark_) << 32 | static_cast<uint64_t>(from) << 16 | static_cast<uint64_t>(stream);
}

void UcxLink::require(UcsStatus status, const char* doing) const {
  if (status < kOk) throw Failure(std::string("UCX cannot ") + doing + ": " + api_.status_text(status));
}

void UcxLink::require_peer(int host, UcsStatus status) const {
  if (status < kOk)
    throw Failure(
        "UCX connection to " + peers_[static_cast<size_t>(host)].name + " failed: " + api_.status_text(status),
        Code::kPeerFailed);
}

Link::Ticket UcxLink::started(void* pointer, int host, bool comes) {
  if (is_request(pointer)) return *transfers_.insert(new Transfer{pointer, host, comes}).first;
  require_peer(host, status_of(pointer));
  return nullptr;
}

void UcxLink::send_message(int host, std::vector<char> message) {
  if (!is_open_) throw Failure("the connections to other hosts were given up");
  outgoing_.push_back({std::move(message), nullptr, host});
  Outgoing& outgoing = outgoing_.back();
  outgoing.request = api_.tag_send(peers_[static_cast<size_t>(host)].endpoint, outgoing.message.data(),
                                   outgoing.message.size(), tag(host_, kNotices), &kPlain);
  if (is_request(outgoing.request)) return;
  const UcsStatus status = status_of(outgoing.request);
  outgoing_.pop_back();
  require_peer(host, status);
}

bool UcxLink::take_message(std::vector<char>* message, int* host) {
  if (!is_open_) return false;
  TagInfo info{};
  Message* const found = api_.tag_probe(worker_, tag(0, kNotices), kAnyHost, 1, &info);
  if (found == nullptr) return false;
  *host = static_cast<int>(info.tag >> 16 & 0xffff);
  if (static_cast<size_t>(*host) >= peers_.size()) throw Failure("UCX has a message of no host of this job");
  if (info.length > kLongest)
    throw Failure("UCX has a message of " + std::to_string(info.length) + " bytes from " +
                  peers_[static_cast<size_t>(*host)].name + ", which is too long to be of this job");
  message->resize(info.length);
  void* const pointer = api_.message_receive(worker_, message->data(), message->size(), found, &kPlain);
  const UcsStatus status = awaited(pointer, kMessage);
  if (status == kInProgress) {
    unfinished_.push_back(std::move(*message));
    throw Failure("UCX connection to " + peers_[static_cast<size_t>(*host)].name + " failed amid a message",
                  Code::kPeerFailed);
  }
  require_peer(*host, status);
  return true;
}

Link::Ticket UcxLink::send(int host, Stream stream, const void* data, size_t bytes) {
  if (!is_open_) throw Failure("the connections to other hosts were given up");
  return started(api_.tag_send(peers_[static_cast<size_t>(host)].endpoint, data, bytes, tag(host_, stream), &kPlain),
                 host, false);
}

Link::Ticket UcxLink::receive(int host, Stream stream, void* data, size_t bytes) {
  if (!is_open_) throw Failure("the connections to other hosts were given up");
  return started(api_.tag_receive(worker_, data, bytes, tag(host, stream), kExactly, &kPlain), host, true);
}

bool UcxLink::done(Ticket ticket) {
  if (ticket == nullptr) return true;
  auto* const transfer = static_cast<Transfer*>(ticket);
  const UcsStatus status = api_.request_status(transfer->request);
  if (status == kInProgress) {
    require_peer(transfer->host, peers_[static_cast<size_t>(transfer->host)].status);
    return false;
  }
  const int host = transfer->host;
  api_.request_free(transfer->request);
  transfers_.erase(transfer);
  delete transfer;
  require_peer(host, status);
  return true;
}

void UcxLink::progress() {
  if (!is_open_) return;
  api_.worker_progress(worker_);
  // Nothing is left for a host that is lost or has ended: who waits for it finds out.
  if (has_lost_peers()) flushed_ = kOk;
  require(flushed_, "send what is left");
  for (auto outgoing = outgoing_.begin(); outgoing != outgoing_.end();) {
    const UcsStatus status = api_.request_status(outgoing->request);
    if (status == kInProgress) {
      ++outgoing;
      continue;
    }
    const int host = outgoing->host;
    api_.request_free(outgoing->request);
    outgoing = outgoing_.erase(outgoing);
    require_peer(host, status);
  }
}

bool UcxLink::all_sent() {
  if (!is_open_) return true;
  if (flush_ != nullptr) {
    const UcsStatus status = api_.request_status(flush_);
    if (status == kInProgress) return false;
    api_.request_free(flush_);
    flush_ = nullptr;
    if (status < kOk) flushed_ = status;
  }
  void* const pointer = api_.worker_flush(worker_, &kPlain);  // what was sent since the last flush began
  if (is_request(pointer)) {
    flush_ = pointer;
  } else if (status_of(pointer) < kOk) {
    flushed_ = status_of(pointer);
  }
  return flush_ == nullptr && (flushed_ == kOk || has_lost_peers()) && outgoing_.empty();
}

void UcxLink::sleep(int64_t microseconds, int notifier) {
  if (!is_open_) return;
  const UcsStatus status = api_.worker_arm(worker_);
  if (status == kBusy) return;  // there is something to progress
  require(status, "wait");
  pollfd descriptors[] = {{descriptor_, POLLIN, 0}, {notifier, POLLIN, 0}};
  const timespec limit{static_cast<time_t>(microseconds / 1'000'000),
                       static_cast<long>(microseconds % 1'000'000) * 1'000};
  if (ppoll(descriptors, notifier < 0 ? 1 : 2, &limit, nullptr) > 0 && descriptors[1].revents != 0) mute(notifier);
}

UcsStatus UcxLink::awaited(void* pointer, int64_t microseconds) {
  if (!is_request(pointer)) return status_of(pointer);
  const int64_t end = microseconds_now() + microseconds;
  UcsStatus status = api_.request_status(pointer);
  while (status == kInProgress && microseconds_now() < end) {
    api_.worker_progress(worker_);
    status = api_.request_status(pointer);
  }
  api_.request_free(pointer);  // UCX forgets it when it is done
  return status;
}

void UcxLink::close_endpoints(bool by_force) {
  const int64_t end = microseconds_now() + (by_force ? kGivingUp : kClosing);
  std::vector<void*> closing;
  for (Peer& peer : peers_) {
    if (peer.endpoint == nullptr) continue;
    RequestParameters parameters{};
    parameters.mask = kHasFlags;
    parameters.flags = by_force || peer.status != kOk ? kForce : 0;
    closing.push_back(api_.ep_close(peer.endpoint, &parameters));
    peer.endpoint = nullptr;
  }
  for (void* const pointer : closing) awaited(pointer, std::max<int64_t>(0, end - microseconds_now()));
}

void UcxLink::give_up() {
  if (!is_open_) return;
  is_open_ = false;
  for (const Transfer* transfer : transfers_) {
    if (transfer->comes) api_.request_cancel(worker_, transfer->request);
  }
  close_endpoints(true);
  const int64_t end = microseconds_now() + kGivingUp;
  for (Transfer* const transfer : transfers_) {
    awaited(transfer->request, std::max<int64_t>(0, end - microseconds_now()));
    delete transfer;
  }
  transfers_.clear();
  if (flush_ != nullptr) awaited(flush_, std::max<int64_t>(0, end - microseconds_now()));
  flush_ = nullptr;
  for (const Outgoing& outgoing : outgoing_) awaited(outgoing.request, std::max<int64_t>(0, end - microseconds_now()));
}

void UcxLink::close() {
  if (worker_ != nullptr && is_open_) {
    if (!peers_.empty()) awaited(api_.worker_flush(worker_, &kPlain), kClosing);
    if (transfers_.empty()) close_endpoints(false);
    give_up();
  }
  if (worker_ != nullptr) api_.worker_destroy(worker_);
  if (context_ != nullptr) api_.cleanup(context_);
  worker_ = nullptr;
  context_ = nullptr;
}

}  // namespace hvkeras::ucx
