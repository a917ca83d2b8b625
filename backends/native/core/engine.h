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
#include "matching.h"

namespace hvkeras {

// A collective that this rank is ready for.
struct Request {
  Key key;
  std::string details;  // what must be equal on all ranks, see Matching::post
  // Runs the collective; all ranks are there. Throws Failure.
  std::function<void(Channel&)> run;
  // Called once, from any thread, with "" or with what went wrong.
  std::function<void(const std::string& error)> done;
};

class Engine {
 public:
  struct Shape {
    int rank = 0;                   // among the ranks of the group on this host
    std::vector<int> global_ranks;  // of these ranks, for messages
    size_t slot_bytes = 0;
    bool crowded = false;  // whether there are more ranks than cores
  };

  static size_t bytes(int ranks, size_t slot_bytes);
  // `memory` is zeroed, of `bytes()`, and the same for all ranks; the engine does not own it.
  Engine(void* memory, Shape shape);
  ~Engine();  // ends what is left with an error
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  int rank() const { return shape_.rank; }
  int ranks() const { return static_cast<int>(shape_.global_ranks.size()); }

  // Takes a request; `done` may be called before this returns. Throws nothing.
  void submit(std::unique_ptr<Request> request);
  // Ends all requests, now and later, with an error.
  void abort(const std::string& reason);

 private:
  using Waiting = std::deque<std::unique_ptr<Request>>;  // of one key; the first one is posted

  bool take_turn();
  void give_turn_back();
  void run_next();
  std::unique_ptr<Request> taken(const Key& key);
  void fail_all();
  void work();

  const Shape shape_;
  Abort abort_;
  Channel channel_;
  Matching matching_;

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::unordered_map<Key, Waiting, KeyHash> waiting_;
  size_t count_ = 0;     // requests in waiting_
  bool running_ = false;  // whether some thread has its turn to read the log and run collectives
  bool stopping_ = false;
  std::thread worker_;
};

}  // namespace hvkeras
