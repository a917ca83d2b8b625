#include "negotiator.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace hvkeras {

// A message between leaders: a key is ready (to the first host), run a key (from the first host), or a contribution to
// a small allreduce (to all). The payload is the contribution, or the hosts whose contributions must be discarded.
struct Negotiator::Message {
  enum Kind : uint32_t { kReady, kRun, kContribution };

  Kind kind = kReady;
  Matching::Ready ready;
  std::vector<char> data;

  std::vector<char> serialize() const {
    const std::string text = ready.status.ok() ? ready.details : ready.status.text();
    const Header header{ready.key,           ready.details_hash,
                        ready.rank,          kind,
                        ready.status.code(), static_cast<uint32_t>(std::min(text.size(), Matching::kMaxText))};
    std::vector<char> message(sizeof header + header.text_bytes + data.size());
    std::memcpy(message.data(), &header, sizeof header);
    std::memcpy(message.data() + sizeof header, text.data(), header.text_bytes);
    if (!data.empty()) std::memcpy(message.data() + sizeof header + header.text_bytes, data.data(), data.size());
    return message;
  }

  static std::vector<char> serialize(const HostNumbers& hosts) {
    std::vector<char> bytes(hosts.size() * sizeof(uint16_t));
    if (!hosts.empty()) std::memcpy(bytes.data(), hosts.data(), bytes.size());
    return bytes;
  }
  HostNumbers hosts() const {
    HostNumbers hosts(data.size() / sizeof(uint16_t));
    if (!hosts.empty()) std::memcpy(hosts.data(), data.data(), hosts.size() * sizeof(uint16_t));
    return hosts;
  }

  static Message deserialize(const std::vector<char>& message) {
    Header header;
    if (message.size() < sizeof header) throw Failure("received a truncated message from another host");
    std::memcpy(&header, message.data(), sizeof header);
    const char* const text = message.data() + sizeof header;
    if (header.text_bytes > message.size() - sizeof header)
      throw Failure("received a truncated message from another host");
    if (header.kind > kContribution) throw Failure("received a message of an unknown kind from another host");
    const std::string content(text, header.text_bytes);
    const bool is_ok = header.code == Code::kOk;
    return {static_cast<Kind>(header.kind),
            {header.key, header.details_hash, header.rank, is_ok ? content : "",
             is_ok ? Status() : Status(header.code, content)},
            std::vector<char>(text + header.text_bytes, message.data() + message.size())};
  }

 private:
  struct Header {
    Key key;
    uint64_t details_hash = 0;
    int32_t rank = 0;
    uint32_t kind = 0;
    Code code = Code::kOk;  // of the text: the details if this is kOk, otherwise the error message
    uint32_t text_bytes = 0;
  };

 public:
  Message() = default;
  Message(Kind message_kind, Matching::Ready about_key, std::vector<char> payload)
      : kind(message_kind), ready(std::move(about_key)), data(std::move(payload)) {}
};

Negotiator::Negotiator(Matching& matching, Link& link, int host, int hosts, bool oversubscribed, int notifier,
                       const AbortFlag& abort)
    : matching_(matching),
      link_(link),
      host_(host),
      hosts_(hosts),
      oversubscribed_(oversubscribed),
      notifier_(notifier),
      abort_(abort) {}

Negotiator::~Negotiator() = default;

void Negotiator::step() {
  for (const Matching::Ready& ready : matching_.take_ready()) {
    if (host_ == 0) {
      count_ready(ready, 0);
    } else {
      link_.send_message(0, Message(Message::kReady, ready, {}).serialize());
    }
  }
  std::vector<char> message;
  int from = 0;
  while (link_.try_receive_message(&message, &from)) on_message(Message::deserialize(message), from);
}

void Negotiator::on_message(const Message& message, int from) {
  if (message.kind == Message::kContribution) {
    store(message, from);
  } else if (host_ == 0) {
    count_ready(message.ready, from);
  } else {
    for (const uint16_t host : message.hosts()) discard(message.ready.key, host);
    matching_.append(message.ready.key, Matching::Step::kRun, message.ready.status);
  }
}

// On the first host: another host is ready for a key. Once all hosts are ready, the key runs everywhere.
void Negotiator::count_ready(const Matching::Ready& ready, int from) {
  ReadyHosts& ready_hosts = ready_hosts_[ready.key];
  if (ready_hosts.hosts.empty()) {
    ready_hosts.first = ready;
  } else if (ready_hosts.first.status.ok()) {
    if (!ready.status.ok()) {
      ready_hosts.first.status = ready.status;
    } else if (ready.details_hash != ready_hosts.first.details_hash) {
      ready_hosts.first.status =
          Matching::mismatch(ready_hosts.first.details, ready_hosts.first.rank, ready.details, ready.rank);
    }
  }
  ready_hosts.hosts.push_back(static_cast<uint16_t>(from));
  if (static_cast<int>(ready_hosts.hosts.size()) == hosts_)
    return broadcast_run(Matching::Ready(ready_hosts.first), {});
  detect_mixed(ready.key);
}

// On the first host. Contributions of `contributors` must be discarded.
void Negotiator::broadcast_run(const Matching::Ready& ready, const HostNumbers& contributors) {
  const Message message(Message::kRun, ready, Message::serialize(contributors));
  for (int host = 1; host < hosts_; ++host) link_.send_message(host, message.serialize());
  for (const uint16_t host : contributors) discard(ready.key, host);
  ready_hosts_.erase(ready.key);
  matching_.append(ready.key, Matching::Step::kRun, ready.status);
}

void Negotiator::contribute(const Key& key, const std::string& details, std::vector<char> contribution) {
  const Message message(Message::kContribution, matching_.make_ready(key, details), std::move(contribution));
  for (int step = 1; step < hosts_; ++step) link_.send_message((host_ + step) % hosts_, message.serialize());
  store(message, host_);
}

Contributions Negotiator::take_contributions(const Key& key) {
  const auto found = complete_.find(key);
  if (found == complete_.end()) throw Failure("internal error: no contributions for a small allreduce");
  Contributions contributions = std::move(found->second);
  complete_.erase(found);
  return contributions;
}

Negotiator::Inbox& Negotiator::inbox_of(const Key& key) {
  Inbox& inbox = inboxes_[key];
  inbox.from.resize(static_cast<size_t>(hosts_));
  inbox.to_discard.resize(static_cast<size_t>(hosts_));
  return inbox;
}

void Negotiator::store(const Message& message, int from) {
  const Key key = message.ready.key;
  Inbox& inbox = inbox_of(key);
  if (inbox.to_discard[static_cast<size_t>(from)] > 0) {
    --inbox.to_discard[static_cast<size_t>(from)];
    return erase_if_empty(key);
  }
  inbox.from[static_cast<size_t>(from)].push_back(message);
  finish_if_complete(key);
}

// Once the contributions of all hosts have arrived, appends to the log: the allreduce finishes, or the hosts differ in
// their details.
void Negotiator::finish_if_complete(const Key& key) {
  Inbox& inbox = inbox_of(key);
  if (std::any_of(inbox.from.begin(), inbox.from.end(), [](const auto& messages) { return messages.empty(); }))
    return detect_mixed(key);
  Contributions contributions;
  Status status;
  const Matching::Ready first = inbox.from[0].front().ready;
  for (std::deque<Message>& messages : inbox.from) {
    const Matching::Ready& other = messages.front().ready;
    if (status.ok() && other.details_hash != first.details_hash)
      status = Matching::mismatch(first.details, first.rank, other.details, other.rank);
    contributions.push_back(std::move(messages.front().data));
    messages.pop_front();
  }
  erase_if_empty(key);
  if (status.ok()) complete_[key] = std::move(contributions);
  matching_.append(key, status.ok() ? Matching::Step::kFinish : Matching::Step::kRun, status);
}

// On the first host: some hosts have sent contributions, and all others are ready for a larger allreduce of the same
// key, which is a mismatch. A host that has done both is one run ahead: its contribution belongs to an earlier run,
// whose other contributions have not arrived yet.
void Negotiator::detect_mixed(const Key& key) {
  const auto ready_hosts = ready_hosts_.find(key);
  const auto contributions = inboxes_.find(key);
  if (ready_hosts == ready_hosts_.end() || contributions == inboxes_.end()) return;
  HostNumbers contributors;
  const HostNumbers& ready = ready_hosts->second.hosts;
  Matching::Ready mixed = ready_hosts->second.first;
  for (int host = 0; host < hosts_; ++host) {
    const std::deque<Message>& messages = contributions->second.from[static_cast<size_t>(host)];
    if (messages.empty()) continue;
    if (std::find(ready.begin(), ready.end(), host) != ready.end()) return;
    const Matching::Ready& other = messages.front().ready;
    if (mixed.status.ok()) mixed.status = Matching::mismatch(mixed.details, mixed.rank, other.details, other.rank);
    contributors.push_back(static_cast<uint16_t>(host));
  }
  if (static_cast<int>(ready.size() + contributors.size()) == hosts_) broadcast_run(mixed, contributors);
}

// Discards a contribution, now or when it arrives.
void Negotiator::discard(const Key& key, int host) {
  if (host >= hosts_) throw Failure("received a message with an invalid host index");
  Inbox& inbox = inbox_of(key);
  std::deque<Message>& messages = inbox.from[static_cast<size_t>(host)];
  if (messages.empty()) {
    ++inbox.to_discard[static_cast<size_t>(host)];
  } else {
    messages.pop_front();
  }
  erase_if_empty(key);
}

void Negotiator::erase_if_empty(const Key& key) {
  const Inbox& inbox = inbox_of(key);
  const bool expected =
      std::any_of(inbox.to_discard.begin(), inbox.to_discard.end(), [](int count) { return count != 0; });
  const bool kept =
      std::any_of(inbox.from.begin(), inbox.from.end(), [](const auto& messages) { return !messages.empty(); });
  if (!expected && !kept) inboxes_.erase(key);
}

bool Negotiator::wait(int64_t microseconds) {
  const int64_t end = microseconds_now() + microseconds;
  Polling polling(oversubscribed_);
  for (;;) {
    abort_.check();
    link_.progress();
    step();
    if (matching_.ready()) return true;
    const int64_t left = end - microseconds_now();
    if (left <= 0) return false;
    if (!polling.keep_polling())
      matching_.sleep_unless_ready([&] { link_.sleep(std::min(left, Polling::kMaxSleepMicros), notifier_); });
  }
}

}  // namespace hvkeras
