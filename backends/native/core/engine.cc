#include "engine.h"

#include <pthread.h>

#include "denormals.h"

namespace hvkeras {

namespace {

constexpr int64_t kCallerWaitMicros = 50;       // for the other ranks, before the caller returns
constexpr double kMaxCallerSeconds = 200e-6;    // of the network's time: a few times that of two context switches
constexpr int64_t kWorkerWaitMicros = 100'000;  // then the worker thread checks whether it must stop

// Regions of shared memory start on page boundaries.
size_t round_up_to_page(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

SpinPolicy spin_policy(bool oversubscribed) { return oversubscribed ? SpinPolicy{20, 200} : SpinPolicy{}; }

}  // namespace

size_t Engine::bytes(int ranks, size_t slot_bytes, int hosts) {
  return round_up_to_page(Matching::bytes()) + round_up_to_page(Channel::bytes(ranks, slot_bytes)) +
         (hosts > 1 ? Hosts::bytes(hosts, slot_bytes) : 0);
}

Engine::Engine(void* memory, Shape shape)
    : shape_(std::move(shape)),
      channel_(static_cast<char*>(memory) + round_up_to_page(Matching::bytes()), shape_.rank, ranks_here(),
               shape_.slot_bytes, spin_policy(shape_.oversubscribed), abort_),
      matching_(memory, shape_.rank, ranks_here(), shape_.global_ranks.data(), abort_, shape_.placement.hosts() > 1,
                shape_.notifier) {
  if (shape_.placement.hosts() > 1) {
    char* const buffers = static_cast<char*>(memory) + bytes(ranks_here(), shape_.slot_bytes);
    hosts_ = std::make_unique<Hosts>(buffers, shape_.placement, shape_.slot_bytes, shape_.costs, shape_.link.get(),
                                     channel_, shape_.oversubscribed);
    channel_.set_hosts(hosts_.get());
  }
  if (shape_.link) {
    negotiator_ = std::make_unique<Negotiator>(matching_, *shape_.link, hosts_->host(), hosts_->hosts(),
                                               shape_.oversubscribed, shape_.notifier, abort_);
    hosts_->poll_while_idle([this] { negotiator_->step(); });
  }
  try {
    worker_ = std::thread([this] { work(); });
  } catch (const std::system_error& error) {
    throw Failure(std::string("failed to start a thread: ") + error.what());
  }
}

// Ends with its scope, or earlier with `end`. Work that has come up by then is left to the worker thread.
class Engine::Turn {
 public:
  Turn() = default;
  explicit Turn(Engine* engine) : engine_(engine) {}  // `running_` must be set already
  Turn(Turn&& other) noexcept : engine_(std::exchange(other.engine_, nullptr)) {}
  Turn& operator=(Turn&&) = delete;
  ~Turn() { end(); }
  explicit operator bool() const { return engine_ != nullptr; }

  void end() noexcept {
    if (Engine* const engine = std::exchange(engine_, nullptr)) leave(*engine);
  }

 private:
  static void leave(Engine& engine) noexcept {
    bool has_failed = false, has_unsent = false;
    try {
      has_unsent = engine.shape_.link && !engine.shape_.link->all_sent();
    } catch (const std::exception& failure) {
      engine.abort_with_link(status_of(failure));
    }
    {
      const std::lock_guard<std::mutex> lock(engine.mutex_);
      engine.running_ = false;
      has_failed = engine.abort_.raised();
      engine.has_unsent_ = has_unsent && !has_failed;
      if (engine.request_count_ != 0 || engine.has_unsent_ || engine.stopping_) engine.changed_.notify_one();
    }
    if (has_failed) engine.fail_all();
  }

  Engine* engine_ = nullptr;
};

std::shared_ptr<ErrorFeedback> Engine::feedback(const Key& key) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<ErrorFeedback>& found = feedback_[key];
  if (!found) found = std::make_shared<ErrorFeedback>();
  return found;
}

void Engine::forget_feedback(const Key& key) {
  std::shared_ptr<ErrorFeedback> forgotten;  // freed without the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = feedback_.find(key);
  if (found == feedback_.end()) return;
  forgotten = std::move(found->second);
  feedback_.erase(found);
}

void Engine::close(const Status& failure) noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  abort(failure);
  if (worker_.joinable()) worker_.join();
}

void Engine::submit(std::unique_ptr<Request> request) {
  const Key key = request->key;
  Status status;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (abort_.raised()) {
      lock.unlock();
      request->done(abort_.status());
      return;
    }
    try {
      RequestQueue& queue = queues_[key];
      queue.push_back(std::move(request));  // moves from `request` only if it succeeds
      ++request_count_;
      if (is_long(*queue.back())) ++long_count_;
      if (queue.size() == 1) post(key, *queue.front());
      if (long_count_ != 0) changed_.notify_one();
    } catch (const std::exception& failure) {
      status = status_of(failure);
    }
  }
  if (!status.ok()) {
    abort(status);
    if (request) request->done(status);
    return;
  }
  int64_t wait_micros = kCallerWaitMicros;
  while (Turn turn = take_turn()) {  // if another thread has the turn, it handles the request
    if (!run_one(std::move(turn), wait_micros, shape_.oversubscribed)) return;
    wait_micros = 0;  // do not wait for further requests
  }
}

// Posts the first request of a key: this rank is ready for it.
void Engine::post(const Key& key, const Request& request) {
  const bool contributes =
      hosts_ && request.allreduce && between_hosts::is_small_allreduce(*request.allreduce, *hosts_);
  matching_.post(key, request.details, contributes);
}

// Waits until the log has an entry for this rank, at most this long. On a leader it also makes progress on the network.
bool Engine::wait(int64_t microseconds, bool sleep) {
  return negotiator_ ? negotiator_->wait(microseconds) : matching_.wait(microseconds, sleep);
}

// Whether a request waits so long for the network that the thread that submits it must not run it.
bool Engine::is_long(const Request& request) const {
  return hosts_ && hosts_->seconds(request.bytes) > kMaxCallerSeconds;
}

// For callers: takes the turn if it is free, and there are outstanding requests, none of them long.
Engine::Turn Engine::take_turn() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (running_ || request_count_ == 0 || long_count_ != 0) return Turn();
  running_ = true;
  return Turn(this);
}

// For the worker thread: waits until the turn is free and there is work. Returns an empty turn when the engine stops.
Engine::Turn Engine::wait_for_turn() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return !running_ && (stopping_ || request_count_ != 0 || has_unsent_); });
  if (stopping_) return Turn();
  running_ = true;
  return Turn(this);
}

// Makes progress on unsent data until there is a request to run, or nothing is left. Returns whether there is a
// request.
bool Engine::flush_link() noexcept {
  try {
    for (;;) {
      const bool sent = !has_unsent_ || shape_.link->all_sent();
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (request_count_ != 0 || sent || stopping_ || abort_.raised()) return request_count_ != 0;
      }
      matching_.sleep_unless_ready([&] { shape_.link->sleep(Polling::kMaxSleepMicros, shape_.notifier); });
      shape_.link->progress();
    }
  } catch (const std::exception& failure) {
    abort_with_link(status_of(failure));
    return false;
  }
}

// Processes log entries until a request has finished. Returns false if none has within this time. The turn ends before
// the request's callback is called, as the callback may take long, and may submit further requests.
bool Engine::run_one(Turn turn, int64_t microseconds, bool sleep) {
  try {
    while (matching_.ready() || (microseconds != 0 && wait(microseconds, sleep))) {
      const Finished finished = run_next();
      if (!finished.request) continue;
      turn.end();
      finished.request->run = nullptr;  // releases the tensors, whose memory may be reused
      finished.request->allreduce = nullptr;
      finished.request->done(finished.status);
      return true;
    }
  } catch (const std::exception& failure) {
    abort_with_link(status_of(failure));
  }
  return false;
}

// Processes the next entry of the log, which may finish a request.
Engine::Finished Engine::run_next() {
  const Matching::Entry entry = matching_.next();
  if (entry.step == Matching::Step::kContribute) {
    contribute(entry.key);
    return {};
  }
  std::unique_ptr<Request> request = pop_request(entry.key);
  Status status = entry.status.ok() ? run(*request, entry) : entry.status;
  return {std::move(request), std::move(status)};
}

// Any failure aborts the engine: the collective may have been interrupted halfway.
Status Engine::run(Request& request, const Matching::Entry& entry) {
  const ScopedDenormals denormals;
  try {
    if (entry.step == Matching::Step::kFinish) {
      between_hosts::finish_small_allreduce(channel_, *request.allreduce,
                                            negotiator_ ? negotiator_->take_contributions(entry.key) : Contributions());
    } else {
      request.run(channel_);
    }
    return Status();
  } catch (const std::exception& failure) {
    const Status status = status_of(failure);
    abort_with_link(status);
    return status;
  }
}

// Sends this host's contribution to a small allreduce to the other hosts. It finishes once theirs have arrived.
void Engine::contribute(const Key& key) {
  const ScopedDenormals denormals;
  const Request& request = front_request(key);
  std::vector<char> contribution = between_hosts::reduce_in_host(channel_, *request.allreduce);
  if (negotiator_) negotiator_->contribute(key, request.details, std::move(contribution));
}

// Aborts the engine and its link. Only for the thread that has the turn.
void Engine::abort_with_link(const Status& failure) noexcept {
  abort_.raise(failure);  // first, so that no thread starts a new transfer on the link
  try {
    if (shape_.link) shape_.link->abort();
  } catch (const std::exception&) {  // the first failure is reported
  }
  abort(failure);
}

// The oldest request of a key, which has been posted. Only the thread that has the turn removes requests.
Request& Engine::front_request(const Key& key) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = queues_.find(key);
  if (found == queues_.end() || found->second.empty())
    throw Failure("internal error: no outstanding request for an entry of the log");
  return *found->second.front();
}

// Removes the oldest request of a key, and posts the next one, if there is one.
std::unique_ptr<Request> Engine::pop_request(const Key& key) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = queues_.find(key);
  if (found == queues_.end() || found->second.empty())
    throw Failure("internal error: no outstanding request for an entry of the log");
  RequestQueue& queue = found->second;
  if (queue.size() > 1) post(key, *queue[1]);
  std::unique_ptr<Request> request = std::move(queue.front());
  queue.pop_front();
  --request_count_;
  if (is_long(*request)) --long_count_;
  if (queue.empty()) queues_.erase(found);
  return request;
}

void Engine::abort(const Status& failure) noexcept {
  abort_.raise(failure);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_all();
    if (running_) return;  // the thread that has the turn fails the requests
  }
  fail_all();
}

void Engine::fail_all() noexcept {
  decltype(queues_) left;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    left.swap(queues_);
    request_count_ = long_count_ = 0;
  }
  for (const auto& [key, queue] : left) {
    for (const auto& request : queue) request->done(abort_.status());
  }
}

// The worker thread: runs collectives that no caller has run.
void Engine::work() {
  pthread_setname_np(pthread_self(), "hvkeras-native");
  while (Turn turn = wait_for_turn()) {
    if (flush_link()) run_one(std::move(turn), kWorkerWaitMicros, true);
  }
  fail_all();
}

}  // namespace hvkeras
