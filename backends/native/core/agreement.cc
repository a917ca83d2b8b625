#include "agreement.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace hvkeras {

// What leaders tell each other: to the first host that a key is ready, from there that it is to be run, and to all a
// part of a small allreduce. Data are the part, or the numbers of the hosts whose parts are to be thrown away.
struct Agreement::PreemptionSignal {
  enum Kind : uint32_t { kReady, kRun, kPart };

  Kind kind = kReady;
  Matching::Ready ready;
  std::vector<char> data;

  std::vector<char> packed() const {
    const std::string text = ready.status.ok() ? ready.details : ready.status.text();
    const Head head{ready.key, ready.details_hash,  ready.rank,
                    kind,      ready.status.code(), static_cast<uint32_t>(std::min(text.size(), Matching::kText))};
    std::vector<char> message(sizeof head + head.text_bytes + data.size());
    std::memcpy(message.data(), &head, sizeof head);
    std::memcpy(message.data() + sizeof head, text.data(), head.text_bytes);
    if (!data.empty()) std::memcpy(message.data() + sizeof head + head.text_bytes, data.data(), data.size());
    return message;
  }

  static std::vector<char> packed(const HostNumbers& hosts) {
    std::vector<char> bytes(hosts.size() * sizeof(uint16_t));
    if (!hosts.empty()) std::memcpy(bytes.data(), hosts.data(), bytes.size());
    return bytes;
  }
  HostNumbers hosts() const {
    HostNumbers hosts(data.size() / sizeof(uint16_t));
    if (!hosts.empty()) std::memcpy(hosts.data(), data.data(), hosts.size() * sizeof(uint16_t));
    return hosts;
  }

  static PreemptionSignal unpacked(const std::vector<char>& message) {
    Head head;
    if (message.size() < sizeof head) throw Failure("a message of another host is too short");
    std::memcpy(&head, message.data(), sizeof head);
    const char* const text = message.data() + sizeof head;
    if (head.text_bytes > message.size() - sizeof head) throw Failure("a message of another host is cut off");
    if (head.kind > kPart) throw Failure("a message of another host is of no kind that this version knows");
    const std::string said(text, head.text_bytes);
    const bool is_ok = head.code == Code::kOk;
    return {static_cast<Kind>(head.kind),
            {head.key, head.details_hash, head.rank, is_ok ? said : "", is_ok ? Status() : Status(head.code, said)},
            std::vector<char>(text + head.text_bytes, message.data() + message.size())};
  }

 private:
  struct Head {
    Key key;
    uint64_t details_hash = 0;
    int32_t rank = 0;
    uint32_t kind = 0;
    Code code = Code::kOk;  // of what the text says, which are the details where all is well
    uint32_t text_bytes = 0;
  };

 public:
  PreemptionSignal() = default;
  PreemptionSignal(Kind what, Matching::Ready about, std::vector<char> with)
      : kind(what), ready(std::move(about)), data(std::move(with)) {}
};

Agreement::Agreement(Matching& matching, Link& link, int host, int hosts, bool oversubscribed, int notifier,
                     const Abort& abort)
    : matching_(matching),
      link_(link),
      host_(host),
      hosts_(hosts),
      oversubscribed_(oversubscribed),
      notifier_(notifier),
      abort_(abort) {}

Agreement::~Agreement() = default;

void Agreement::step() {
  for (const Matching::Ready& ready : matching_.take_ready()) {
    if (host_ == 0) {
      count(ready, 0);
    } else {
      link_.send_message(0, PreemptionSignal(PreemptionSignal::kReady, ready, {}).packed());
    }
  }
  std::vector<char> message;
  int from = 0;
  while (link_.take_message(&message, &from)) on_message(PreemptionSignal::unpacked(message), from);
}

void Agreement::on_message(const PreemptionSignal& notice, int from) {
  if (notice.kind == PreemptionSignal::kPart) {
    keep(notice, from);
  } else if (host_ == 0) {
    count(notice.ready, from);
  } else {
    for (const uint16_t host : notice.hosts()) drop(notice.ready.key, host);
    matching_.append(notice.ready.key, Matching::Step::kRun, notice.ready.status);
  }
}

// On the first host: another host is ready for a key. With the last one, it is run everywhere.
void Agreement::count(const Matching::Ready& ready, int from) {
  Tally& tally = tallies_[ready.key];
  if (tally.hosts.empty()) {
    tally.first = ready;
  } else if (tally.first.status.ok()) {
    if (!ready.status.ok()) {
      tally.first.status = ready.status;
    } else if (ready.details_hash != tally.first.details_hash) {
      tally.first.status = Matching::mismatch(tally.first.details, tally.first.rank, ready.details, ready.rank);
    }
  }
  tally.hosts.push_back(static_cast<uint16_t>(from));
  if (static_cast<int>(tally.hosts.size()) == hosts_) return run_everywhere(Matching::Ready(tally.first), {});
  settle_mixed(ready.key);
}

// On the first host. `offered` are the hosts that have sent parts, which nobody is to use.
void Agreement::run_everywhere(const Matching::Ready& ready, const HostNumbers& offered) {
  const PreemptionSignal notice(PreemptionSignal::kRun, ready, PreemptionSignal::packed(offered));
  for (int host = 1; host < hosts_; ++host) link_.send_message(host, notice.packed());
  for (const uint16_t host : offered) drop(ready.key, host);
  tallies_.erase(ready.key);
  matching_.append(ready.key, Matching::Step::kRun, ready.status);
}

void Agreement::offer(const Key& key, const std::string& details, std::vector<char> part) {
  const PreemptionSignal notice(PreemptionSignal::kPart, matching_.own(key, details), std::move(part));
  for (int step = 1; step < hosts_; ++step) link_.send_message((host_ + step) % hosts_, notice.packed());
  keep(notice, host_);
}

Parts Agreement::take(const Key& key) {
  const auto found = complete_.find(key);
  if (found == complete_.end()) throw Failure("the parts of an allreduce were lost");
  Parts parts = std::move(found->second);
  complete_.erase(found);
  return parts;
}

Agreement::Offered& Agreement::offered(const Key& key) {
  Offered& offered = offered_[key];
  offered.from.resize(static_cast<size_t>(hosts_));
  offered.unwanted.resize(static_cast<size_t>(hosts_));
  return offered;
}

void Agreement::keep(const PreemptionSignal& notice, int from) {
  const Key key = notice.ready.key;
  Offered& all = offered(key);
  if (all.unwanted[static_cast<size_t>(from)] > 0) {
    --all.unwanted[static_cast<size_t>(from)];
    return forget_if_empty(key);
  }
  all.from[static_cast<size_t>(from)].push_back(notice);
  settle(key);
}

// If the parts of all hosts are there, they are for the allreduce, or differ in what they are parts of.
void Agreement::settle(const Key& key) {
  Offered& all = offered(key);
  if (std::any_of(all.from.begin(), all.from.end(), [](const auto& notices) { return notices.empty(); }))
    return settle_mixed(key);
  Parts parts;
  Status status;
  const Matching::Ready first = all.from[0].front().ready;
  for (std::deque<PreemptionSignal>& notices : all.from) {
    const Matching::Ready& other = notices.front().ready;
    if (status.ok() && other.details_hash != first.details_hash)
      status = Matching::mismatch(first.details, first.rank, other.details, other.rank);
    parts.push_back(std::move(notices.front().data));
    notices.pop_front();
  }
  forget_if_empty(key);
  if (status.ok()) complete_[key] = std::move(parts);
  matching_.append(key, status.ok() ? Matching::Step::kFinish : Matching::Step::kRun, status);
}

// On the first host: where some hosts have sent parts, and all others are ready for something larger, they differ. A
// host that has done both is ahead: its part is for the run before, of which other parts are still on their way.
void Agreement::settle_mixed(const Key& key) {
  const auto tally = tallies_.find(key);
  const auto parts = offered_.find(key);
  if (tally == tallies_.end() || parts == offered_.end()) return;
  HostNumbers offering;
  const HostNumbers& ready = tally->second.hosts;
  Matching::Ready mixed = tally->second.first;
  for (int host = 0; host < hosts_; ++host) {
    const std::deque<PreemptionSignal>& notices = parts->second.from[static_cast<size_t>(host)];
    if (notices.empty()) continue;
    if (std::find(ready.begin(), ready.end(), host) != ready.end()) return;
    const Matching::Ready& other = notices.front().ready;
    if (mixed.status.ok()) mixed.status = Matching::mismatch(mixed.details, mixed.rank, other.details, other.rank);
    offering.push_back(static_cast<uint16_t>(host));
  }
  if (static_cast<int>(ready.size() + offering.size()) == hosts_) run_everywhere(mixed, offering);
}

// Throws away a part, now or when it comes.
void Agreement::drop(const Key& key, int host) {
  if (host >= hosts_) throw Failure("a message of another host names one that is not in the job");
  Offered& all = offered(key);
  std::deque<PreemptionSignal>& notices = all.from[static_cast<size_t>(host)];
  if (notices.empty()) {
    ++all.unwanted[static_cast<size_t>(host)];
  } else {
    notices.pop_front();
  }
  forget_if_empty(key);
}

void Agreement::forget_if_empty(const Key& key) {
  const Offered& all = offered(key);
  const bool expected = std::any_of(all.unwanted.begin(), all.unwanted.end(), [](int count) { return count != 0; });
  const bool kept = std::any_of(all.from.begin(), all.from.end(), [](const auto& notices) { return !notices.empty(); });
  if (!expected && !kept) offered_.erase(key);
}

bool Agreement::await(int64_t microseconds) {
  const int64_t end = microseconds_now() + microseconds;
  Polling polling(oversubscribed_);
  for (;;) {
    abort_.check();
    link_.progress();
    step();
    if (matching_.ready()) return true;
    const int64_t left = end - microseconds_now();
    if (left <= 0) return false;
    if (!polling.goes_on())
      matching_.sleep_unless_ready([&] { link_.sleep(std::min(left, Polling::kLongestSleep), notifier_); });
  }
}

}  // namespace hvkeras
