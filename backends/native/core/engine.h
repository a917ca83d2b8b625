// The engine of one group of ranks: accepts requests from any thread, and runs them in the common order.
//
// If all ranks are ready, the thread that submits a request runs it immediately, which saves two context switches.
// Otherwise the caller returns, and the group's worker thread runs the request later. It also runs those that wait long
// for the network, as the caller may be the only thread that computes.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "collectives.h"
#include "compressed_allreduce.h"
#include "hosts.h"
#include "negotiator.h"
#include "small_allreduce.h"

namespace hvkeras {

// A collective that this rank is ready to run.
struct Request {
  Key key;
  std::string details;  // must be equal on all ranks, see Matching::post
  // Runs the collective once all ranks are ready. Throws Failure.
  std::function<void(Channel&)> run;
  // The arguments of `run` if it is an allreduce: small ones use a different algorithm between hosts.
  std::shared_ptr<const Allreduce> allreduce = {};
  size_t bytes = 0;  // of this rank's inputs
  // Called exactly once, from any thread.
  std::function<void(const Status& status)> done;
};

class Engine {
 public:
  struct Shape {
    int rank = 0;                   // index among the group's ranks on this host
    std::vector<int> global_ranks;  // of the group's ranks on this host, for messages
    size_t slot_bytes = 0;
    bool oversubscribed = false;  // whether there are more ranks than cores
    // Only for groups on several hosts: the placement of ranks, the link (on the first rank of each host) and the
    // notifier that wakes this rank (see notifier.h).
    Placement placement = {};
    Costs costs = {};  // the same on all ranks
    std::unique_ptr<Link> link = {};
    int notifier = -1;
  };

  // `ranks` counts the group's ranks on this host, `hosts` the group's hosts.
  static size_t bytes(int ranks, size_t slot_bytes, int hosts = 1);
  // `memory` is zeroed, of `bytes()`, and the same for all ranks of the host; the engine does not own it.
  Engine(void* memory, Shape shape);
  ~Engine() { close({Code::kFailed, "the engine was shut down"}); }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // This rank's index in the group, and the size of the group.
  int rank() const { return hosts_ ? hosts_->placement().rank : shape_.rank; }
  int ranks() const { return hosts_ ? hosts_->placement().ranks() : ranks_here(); }

  // Whether the group's ranks are on several hosts.
  bool spans_hosts() const { return hosts_ != nullptr; }
  // The rounding errors of a compressed allreduce; used by its runs, and between them by other threads.
  std::shared_ptr<ErrorFeedback> feedback(const Key& key);
  // Forgets them, also while the allreduce runs: they are freed once nothing uses them.
  void forget_feedback(const Key& key);

  // Submits a request; `done` may be called before this returns. Does not throw.
  void submit(std::unique_ptr<Request> request);
  // Fails all requests, current and future.
  void abort(const Status& failure) noexcept;
  // Fails the outstanding requests, and joins the worker thread, which must not be the caller.
  void close(const Status& failure) noexcept;
  // The status of future requests: success, or the failure that ended the engine.
  const Status& status() const { return abort_.status(); }
  // Whether the caller is the worker thread.
  bool is_worker_thread() const { return worker_.get_id() == std::this_thread::get_id(); }

 private:
  using RequestQueue = std::deque<std::unique_ptr<Request>>;  // of one key; the first one is posted

  int ranks_here() const { return static_cast<int>(shape_.global_ranks.size()); }
  // The right to read the log, run its entries and use the link, which one thread has at a time.
  class Turn;
  // A finished request, and its status.
  struct Finished {
    std::unique_ptr<Request> request;
    Status status;
  };

  bool wait(int64_t microseconds, bool sleep);
  Turn take_turn();
  Turn wait_for_turn();
  bool flush_link() noexcept;
  bool run_one(Turn turn, int64_t microseconds, bool sleep);
  Finished run_next();
  Status run(Request& request, const Matching::Entry& entry);
  void contribute(const Key& key);
  void abort_with_link(const Status& failure) noexcept;
  bool is_long(const Request& request) const;
  void post(const Key& key, const Request& request);
  Request& front_request(const Key& key);
  std::unique_ptr<Request> pop_request(const Key& key);
  void fail_all() noexcept;
  void work();

  const Shape shape_;
  AbortFlag abort_;
  Channel channel_;
  Matching matching_;
  std::unique_ptr<Hosts> hosts_;            // only for groups on several hosts
  std::unique_ptr<Negotiator> negotiator_;  // only on the leader of a host in such a group

  std::mutex mutex_;  // guards the following members
  std::condition_variable changed_;
  std::unordered_map<Key, RequestQueue, KeyHash> queues_;
  std::unordered_map<Key, std::shared_ptr<ErrorFeedback>, KeyHash> feedback_;
  size_t request_count_ = 0;  // in queues_
  size_t long_count_ = 0;     // of these, those that only the worker thread runs
  bool has_unsent_ = false;   // whether the link may still have data that other hosts wait for
  bool running_ = false;      // whether some thread has the turn
  bool stopping_ = false;
  std::thread worker_;
};

}  // namespace hvkeras
