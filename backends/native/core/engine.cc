#include "engine.h"

#include <pthread.h>

#include "small_numbers.h"

namespace hvkeras {

namespace {

constexpr int64_t kHelp = 50;       // microseconds for which a caller waits for other ranks before it goes on
constexpr int64_t kLook = 100'000;  // microseconds after which the worker looks whether it is to stop

// A page, so that the parts of the memory do not share one.
size_t paged(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

Patience patience(bool crowded) { return crowded ? Patience{20, 200} : Patience{}; }

}  // namespace

size_t Engine::bytes(int ranks, size_t slot_bytes, int hosts) {
  return paged(Matching::bytes()) + paged(Channel::bytes(ranks, slot_bytes)) +
         (hosts > 1 ? Hosts::bytes(hosts, slot_bytes) : 0);
}

Engine::Engine(void* memory, Shape shape)
    : shape_(std::move(shape)),
      channel_(static_cast<char*>(memory) + paged(Matching::bytes()), shape_.rank, ranks_here(), shape_.slot_bytes,
               patience(shape_.crowded), abort_),
      matching_(memory, shape_.rank, ranks_here(), shape_.global_ranks.data(), abort_, shape_.placement.hosts() > 1) {
  if (shape_.placement.hosts() > 1) {
    char* const areas = static_cast<char*>(memory) + bytes(ranks_here(), shape_.slot_bytes);
    hosts_ = std::make_unique<Hosts>(areas, shape_.placement, shape_.slot_bytes, shape_.link.get(), channel_,
                                     shape_.crowded);
    channel_.set_hosts(hosts_.get());
  }
  if (shape_.link) {
    agreement_ =
        std::make_unique<Agreement>(matching_, *shape_.link, hosts_->host(), hosts_->hosts(), shape_.crowded, abort_);
    hosts_->meanwhile([this] { agreement_->step(); });
  }
  worker_ = std::thread([this] { work(); });
}

bool Engine::close() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  abort("the engine was shut down");
  if (worker_.joinable()) worker_.join();
  return hosts_ && hosts_->busy();
}

void Engine::submit(std::unique_ptr<Request> request) {
  const Key key = request->key;
  std::string error;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (abort_.raised()) {
      lock.unlock();
      request->done(abort_.reason());
      return;
    }
    Waiting& queue = waiting_[key];
    const bool first = queue.empty();
    const std::string details = request->details;
    queue.push_back(std::move(request));
    ++count_;
    try {
      if (first) matching_.post(key, details);
    } catch (const Failure& failure) {
      error = failure.what();
    }
  }
  if (!error.empty()) return abort(error);
  int64_t help = kHelp;
  while (take_turn()) {  // if another thread has it, that thread sees the request
    bool ran = false;
    try {
      ran = matching_.ready() || (help != 0 && await(help, shape_.crowded));
      if (ran) run_next();
    } catch (const Failure& failure) {
      abort(failure.what());
      ran = false;
    }
    if (!ran) return give_turn_back();
    help = 0;  // further requests are worth no waiting
  }
}

// Waits until the log has an entry for this rank, for at most so long. A leader brings it there.
bool Engine::await(int64_t microseconds, bool asleep) {
  return agreement_ ? agreement_->await(microseconds) : matching_.await(microseconds, asleep);
}

// Whether this thread may read the log and run what stands there; only if there is something to wait for.
bool Engine::take_turn() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (running_ || count_ == 0) return false;
  running_ = true;
  return true;
}

void Engine::give_turn_back() {
  bool failed = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    running_ = false;
    failed = abort_.raised();
    if (count_ != 0) changed_.notify_one();
  }
  if (failed) fail_all();
}

// Runs the next entry of the log, gives the turn back, and hands the result out: what follows from it may take long,
// and may hand in further requests.
void Engine::run_next() {
  const Matching::Entry entry = matching_.next();
  std::unique_ptr<Request> request = taken(entry.key);
  std::string error = entry.error;
  if (error.empty()) {
    try {
      const SmallNumbersKept kept;
      request->run(channel_);
    } catch (const Failure& failure) {
      error = failure.what();
      abort(error);
    }
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    running_ = false;
    if (count_ != 0) changed_.notify_one();
  }
  request->run = nullptr;  // lets go of the tensors, so that what follows from them may use their memory
  request->done(error);
}

// The request that was posted under a key; the next one of that key, if there is one, is posted instead.
std::unique_ptr<Request> Engine::taken(const Key& key) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = waiting_.find(key);
  if (found == waiting_.end()) throw Failure("the ranks' order of collectives was lost");
  Waiting& queue = found->second;
  if (queue.size() > 1) matching_.post(key, queue[1]->details);
  std::unique_ptr<Request> request = std::move(queue.front());
  queue.pop_front();
  --count_;
  if (queue.empty()) waiting_.erase(found);
  return request;
}

void Engine::abort(const std::string& reason) {
  abort_.raise(reason);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_all();
    if (running_) return;  // whose turn it is ends the requests
  }
  fail_all();
}

void Engine::fail_all() {
  std::vector<std::unique_ptr<Request>> left;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [key, queue] : waiting_) {
      for (auto& request : queue) left.push_back(std::move(request));
    }
    waiting_.clear();
    count_ = 0;
  }
  for (const auto& request : left) request->done(abort_.reason());
}

// The group's own thread: runs what the callers left.
void Engine::work() {
  pthread_setname_np(pthread_self(), "hvkeras-native");
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return stopping_ || (count_ != 0 && !running_); });
      if (stopping_ && !running_) break;
      if (running_ || count_ == 0) continue;
      running_ = true;
    }
    bool ran = false;
    try {
      ran = matching_.ready() || await(kLook, true);
      if (ran) run_next();
    } catch (const Failure& failure) {
      abort(failure.what());
      ran = false;
    }
    if (!ran) give_turn_back();
  }
  fail_all();
}

}  // namespace hvkeras
