#include "agreement.h"

#include <algorithm>
#include <cstring>

namespace hvkeras {

// What leaders tell each other: to the first host that a key is ready, from there that it is to be run.
struct Agreement::Notice {
  Key key;
  uint64_t details_hash = 0;
  int32_t rank = 0;
  uint32_t is_error = 0;  // whether the text says what differs; else it is the beginning of the details
  uint32_t length = 0;
  char text[Matching::kText] = {};

  Notice() = default;
  explicit Notice(const Matching::Ready& ready)
      : key(ready.key), details_hash(ready.details_hash), rank(ready.rank), is_error(!ready.error.empty()) {
    const std::string& said = is_error != 0 ? ready.error : ready.details;
    length = static_cast<uint32_t>(std::min(said.size(), sizeof text));
    std::memcpy(text, said.data(), length);
  }
  Matching::Ready ready() const {
    const std::string said(text, length);
    return {key, details_hash, rank, is_error != 0 ? "" : said, is_error != 0 ? said : ""};
  }
};

void Agreement::step() {
  for (const Matching::Ready& ready : matching_.take_ready()) {
    if (host_ == 0) {
      count(ready);
    } else {
      const Notice notice(ready);
      link_.tell(0, &notice, sizeof notice);
    }
  }
  Notice heard;
  int from = 0;
  while (link_.hear(&heard, sizeof heard, &from)) {
    const Matching::Ready ready = heard.ready();
    if (host_ == 0) {
      count(ready);
    } else {
      matching_.append(ready.key, ready.error);
    }
  }
}

// On the first host: another host is ready for a key. With the last one, it is run everywhere.
void Agreement::count(const Matching::Ready& ready) {
  Tally& tally = tallies_[ready.key];
  if (tally.hosts == 0) {
    tally.first = ready;
  } else if (tally.first.error.empty()) {
    if (!ready.error.empty()) {
      tally.first.error = ready.error;
    } else if (ready.details_hash != tally.first.details_hash) {
      tally.first.error = Matching::difference(tally.first.details, tally.first.rank, ready.details, ready.rank);
    }
  }
  if (++tally.hosts < hosts_) return;
  const Notice notice(tally.first);
  for (int host = 1; host < hosts_; ++host) link_.tell(host, &notice, sizeof notice);
  matching_.append(tally.first.key, tally.first.error);
  tallies_.erase(ready.key);
}

bool Agreement::await(int64_t microseconds) {
  const int64_t end = microseconds_now() + microseconds;
  Pauses pauses(crowded_);
  for (;;) {
    abort_.check();
    step();
    if (matching_.ready()) return true;
    const int64_t left = end - microseconds_now();
    if (left <= 0) return false;
    if (const int64_t pause = pauses.next()) matching_.await_ready(std::min(pause, left));
  }
}

}  // namespace hvkeras
