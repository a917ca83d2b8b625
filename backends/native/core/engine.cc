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
      matching_(memory, shape_.rank, ranks_here(), shape_.global_ranks.data(), abort_, shape_.placement.hosts() > 1,
                shape_.bell) {
  if (shape_.placement.hosts() > 1) {
    char* const areas = static_cast<char*>(memory) + bytes(ranks_here(), shape_.slot_bytes);
    hosts_ = std::make_unique<Hosts>(areas, shape_.placement, shape_.slot_bytes, shape_.costs, shape_.link.get(),
                                     channel_, shape_.crowded);
    channel_.set_hosts(hosts_.get());
  }
  if (shape_.link) {
    agreement_ = std::make_unique<Agreement>(matching_, *shape_.link, hosts_->host(), hosts_->hosts(), shape_.crowded,
                                             shape_.bell, abort_);
    hosts_->meanwhile([this] { agreement_->step(); });
  }
  try {
    worker_ = std::thread([this] { work(); });
  } catch (const std::system_error& error) {
    throw Failure(std::string("a thread cannot be started: ") + error.what());
  }
}

void Engine::close(const std::string& reason) noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  abort(reason);
  if (worker_.joinable()) worker_.join();
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
    try {
      Waiting& queue = waiting_[key];
      queue.push_back(std::move(request));  // which takes it only where there is room
      ++count_;
      if (queue.size() == 1) post(key, *queue.front());
    } catch (const std::exception& failure) {
      error = message_of(failure);
    }
  }
  if (!error.empty()) {
    abort(error);
    if (request) request->done(error);
    return;
  }
  int64_t help = kHelp;
  while (take_turn()) {  // if another thread has it, that thread sees the request
    bool ran = false;
    try {
      ran = run_one(help, shape_.crowded);
    } catch (const std::exception& failure) {
      give_up(message_of(failure));
      ran = false;
    }
    if (!ran) return give_turn_back();
    help = 0;  // further requests are worth no waiting
  }
}

// Says that this rank is ready for a request, the first of its key.
void Engine::post(const Key& key, const Request& request) {
  const bool offers = hosts_ && request.allreduce && between_hosts::is_small(*request.allreduce, *hosts_);
  matching_.post(key, request.details, offers);
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
  bool failed = false, unsent = false;
  try {
    unsent = shape_.link && !shape_.link->all_sent();
  } catch (const std::exception& failure) {
    give_up(message_of(failure));
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    running_ = false;
    failed = abort_.raised();
    unsent_ = unsent && !failed;
    if (count_ != 0 || unsent_) changed_.notify_one();
  }
  if (failed) fail_all();
}

// Moves on what the link holds back, until there is something else to do; returns whether there is.
bool Engine::send_rest() {
  for (;;) {
    const bool sent = !unsent_ || shape_.link->all_sent();
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (count_ != 0 || sent || stopping_ || abort_.raised()) return count_ != 0;
    }
    matching_.sleep_unless_ready([&] { shape_.link->sleep(Polling::kLongestSleep, shape_.bell); });
    shape_.link->progress();
  }
}

// Runs what the log asks for until a request has ended, which gives the turn back; or returns false, with the turn, if
// there is nothing for so long.
bool Engine::run_one(int64_t microseconds, bool asleep) {
  while (matching_.ready() || (microseconds != 0 && await(microseconds, asleep))) {
    if (run_next()) return true;
  }
  return false;
}

// Runs the next entry of the log. If that ends a request, gives the turn back, and hands the result out: what follows
// from it may take long, and may hand in further requests.
bool Engine::run_next() {
  const Matching::Entry entry = matching_.next();
  if (entry.step == Matching::Step::kOffer) {
    offer(entry.key);
    return false;
  }
  std::unique_ptr<Request> request = taken(entry.key);
  std::string error = entry.error;
  if (error.empty()) {
    try {
      run(*request, entry);
    } catch (const std::exception& failure) {
      error = message_of(failure);
      give_up(error);
    }
  }
  give_turn_back();
  request->run = nullptr;  // lets go of the tensors, so that what follows from them may use their memory
  request->allreduce = nullptr;
  request->done(error);
  return true;
}

void Engine::run(Request& request, const Matching::Entry& entry) {
  const SmallNumbersKept kept;
  if (entry.step == Matching::Step::kFinish) {
    between_hosts::finish(channel_, *request.allreduce, agreement_ ? agreement_->take(entry.key) : Parts());
  } else {
    request.run(channel_);
  }
}

// Gives the other hosts what this one has of a small allreduce, which is finished when they have done so, too.
void Engine::offer(const Key& key) {
  const SmallNumbersKept kept;
  const Request& request = first(key);
  std::vector<char> part = between_hosts::part_of_host(channel_, *request.allreduce);
  if (agreement_) agreement_->offer(key, request.details, std::move(part));
}

// Ends everything, once a collective has failed in the midst of it.
void Engine::give_up(const std::string& reason) noexcept {
  abort_.raise(reason);  // first, so that nobody begins anything on the link
  try {
    if (shape_.link) shape_.link->give_up();
  } catch (const std::exception&) {  // the first reason stays
  }
  abort(reason);
}

// The request that was posted under a key. Nobody else takes it: this thread has the turn.
Request& Engine::first(const Key& key) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = waiting_.find(key);
  if (found == waiting_.end() || found->second.empty()) throw Failure("the ranks' order of collectives was lost");
  return *found->second.front();
}

// The same, taken away; the next one of that key, if there is one, is posted instead.
std::unique_ptr<Request> Engine::taken(const Key& key) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = waiting_.find(key);
  if (found == waiting_.end() || found->second.empty()) throw Failure("the ranks' order of collectives was lost");
  Waiting& queue = found->second;
  if (queue.size() > 1) post(key, *queue[1]);
  std::unique_ptr<Request> request = std::move(queue.front());
  queue.pop_front();
  --count_;
  if (queue.empty()) waiting_.erase(found);
  return request;
}

void Engine::abort(const std::string& reason) noexcept {
  abort_.raise(reason);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_all();
    if (running_) return;  // whose turn it is ends the requests
  }
  fail_all();
}

void Engine::fail_all() noexcept {
  decltype(waiting_) left;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    left.swap(waiting_);
    count_ = 0;
  }
  for (const auto& [key, queue] : left) {
    for (const auto& request : queue) request->done(abort_.reason());
  }
}

// The group's own thread: runs what the callers left.
void Engine::work() {
  pthread_setname_np(pthread_self(), "hvkeras-native");
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return stopping_ || ((count_ != 0 || unsent_) && !running_); });
      if (stopping_ && !running_) break;
      if (running_ || (count_ == 0 && !unsent_)) continue;
      running_ = true;
    }
    bool ran = false;
    try {
      ran = send_rest() && run_one(kLook, true);
    } catch (const std::exception& failure) {
      give_up(message_of(failure));
      ran = false;
    }
    if (!ran) give_turn_back();
  }
  fail_all();
}

}  // namespace hvkeras
