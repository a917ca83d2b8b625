// One group of ranks at work: takes requests from any thread, and runs them in the common order.
//
// The thread that hands in a request runs it at once if all ranks are there, which spares two changes of threads;
// otherwise a thread of the group's own does as soon as they are, and the caller goes on.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "collectives.h"
#include "hosts.h"
#include "negotiator.h"
#include "small_allreduce.h"

namespace hvkeras {

// A collective that this rank is ready for.
struct Request {
  Key key;
  std::string details;  // what must be equal on all ranks, see Matching::post
  // Runs the collective; all ranks are there. Throws Failure.
  std::function<void(Channel&)> run;
  // What that does, if it is an allreduce: a small one goes another way between hosts.
  std::shared_ptr<const Allreduce> allreduce = {};
  // Called once, from any thread.
  std::function<void(const Status& status)> done;
};

class Engine {
 public:
  struct Shape {
    int rank = 0;                   // among the ranks of the group on this host
    std::vector<int> global_ranks;  // of these ranks, for messages
    size_t slot_bytes = 0;
    bool oversubscribed = false;  // whether there are more ranks than cores
    // Of a group on several hosts: who is where, on the first rank of each host the way to the others, and what wakes
    // that rank (see notifier.h).
    Placement placement = {};
    Costs costs = {};  // the same on all ranks
    std::unique_ptr<Link> link = {};
    int notifier = -1;
  };

  // `ranks` are those on this host, and `hosts` all that the group has ranks on.
  static size_t bytes(int ranks, size_t slot_bytes, int hosts = 1);
  // `memory` is zeroed, of `bytes()`, and the same for all ranks; the engine does not own it.
  Engine(void* memory, Shape shape);
  ~Engine() { close({Code::kFailed, "the engine was shut down"}); }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // This rank's number in the group, and how many ranks that has.
  int rank() const { return hosts_ ? hosts_->placement().rank : shape_.rank; }
  int ranks() const { return hosts_ ? hosts_->placement().ranks() : ranks_here(); }

  // Takes a request; `done` may be called before this returns. Throws nothing.
  void submit(std::unique_ptr<Request> request);
  // Ends all requests, now and later, with a failure.
  void abort(const Status& failure) noexcept;
  // Ends what is left with a failure, and the group's thread, which must not be the caller.
  void close(const Status& failure) noexcept;
  // How requests end from now on: success, or the failure that ended the engine.
  const Status& status() const { return abort_.status(); }
  // Whether the caller is the group's thread.
  bool is_worker_thread() const { return worker_.get_id() == std::this_thread::get_id(); }

 private:
  using RequestQueue = std::deque<std::unique_ptr<Request>>;  // of one key; the first one is posted

  int ranks_here() const { return static_cast<int>(shape_.global_ranks.size()); }
  // The right to read the log, to run what stands there and to use the link, which one thread at a time has.
  class Turn;
  // A request that has been run, and how that ended.
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
  void post(const Key& key, const Request& request);
  Request& front_request(const Key& key);
  std::unique_ptr<Request> pop_request(const Key& key);
  void fail_all() noexcept;
  void work();

  const Shape shape_;
  AbortFlag abort_;
  Channel channel_;
  Matching matching_;
  std::unique_ptr<Hosts> hosts_;            // of a group on several hosts
  std::unique_ptr<Negotiator> negotiator_;  // of the leader of a host in such a group

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::unordered_map<Key, RequestQueue, KeyHash> queues_;
  size_t request_count_ = 0;  // requests in waiting_
  bool has_unsent_ = false;   // whether the link may hold something back that other hosts wait for
  bool running_ = false;      // whether some thread has its turn
  bool stopping_ = false;
  std::thread worker_;
};

}  // namespace hvkeras
