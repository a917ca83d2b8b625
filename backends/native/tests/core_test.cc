// Tests of the core with ranks as threads of one process, so that sanitizers see all of them; timings with ranks as
// processes.
//
//   core_test check [seconds]     thousands of mixed collectives in different orders, every result compared
//   core_test many                a thousand ranks on one host
//   core_test time [ranks]        allreduce at several sizes
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <random>

#include "../core/denormals.h"
#include "../core/notifier.h"
#include "../core/quantize.h"
#include "engine_calls.h"
#include "in_process_link.h"

namespace {

using namespace hvkeras;

size_t length_of(int number) {
  const size_t lengths[] = {1, 3, 0, 1000, 17, 40'000, 300'001, 5};
  return lengths[static_cast<size_t>(number) % 8];
}

float value_of(int rank, int number, size_t index) {
  return static_cast<float>((rank + 1) * (1 + number % 7) + static_cast<int>(index % 13));
}

// reduce_parts, then gather_parts, on two tensors; the last rank has all of the second one.
void check_parts(Engine& engine, const std::string& name, int number, std::vector<float>& in, std::vector<float>& out) {
  const size_t ranks = static_cast<size_t>(engine.ranks()), me = static_cast<size_t>(engine.rank());
  const size_t length = in.size(), half = length / 2;
  const auto start_of = [&](size_t rank) { return half * rank / ranks; };
  std::vector<Spans> reduced, gathered;
  for (size_t rank = 0; rank < ranks; ++rank) {
    std::vector<Span> mine, bytes;
    const auto add = [&](size_t start, size_t count) {
      char* const source = reinterpret_cast<char*>(in.data() + start);
      mine.push_back({source, source, count});
      bytes.push_back({source, reinterpret_cast<char*>(out.data() + start), count * sizeof(float)});
    };
    add(start_of(rank), start_of(rank + 1) - start_of(rank));
    if (rank + 1 == ranks) add(half, length - half);
    reduced.emplace_back(std::move(mine), sizeof(float));
    gathered.emplace_back(std::move(bytes), 1);
  }
  Status status = call(engine, name + ", reduced", "", [&](Channel& channel) {
    reduce_parts(channel, reduced, Type::kFloat32, Reduction::kSum, {1.0, 0.5});
  });
  require_ok(status, name);
  status = call(engine, name + ", gathered", "", [&](Channel& channel) { gather_parts(channel, gathered); });
  require_ok(status, name);
  for (size_t index = 0; index < length; ++index) {
    float sum = 0;
    for (int from = 0; from < engine.ranks(); ++from) sum += value_of(from, number, index);
    const bool is_mine = index < half ? start_of(me) <= index && index < start_of(me + 1) : me + 1 == ranks;
    require(in[index] == (is_mine ? 0.5f * sum : value_of(engine.rank(), number, index)), name + ", a part of a sum");
    require(out[index] == 0.5f * sum, name + ", a gathered part");
  }
}

// Runs a collective whose kind depends on its number, and checks the result.
void run_one_collective(Engine& engine, int number) {
  const int ranks = engine.ranks(), rank = engine.rank();
  const size_t length = length_of(number);
  const std::string name = "collective " + std::to_string(number);
  std::vector<float> in(length), out(length, -1.0f);
  for (size_t index = 0; index < length; ++index) in[index] = value_of(rank, number, index);
  Status status;
  if (number % 7 == 6) {  // alltoall with a different number of rows for each pair of ranks; then reducescatter
    std::vector<size_t> rows_to, rows_from;
    std::vector<int32_t> sent, received(1000, -1);
    for (int to = 0; to < ranks; ++to) {
      rows_to.push_back(static_cast<size_t>(to + rank));
      for (int row = 0; row < to + rank; ++row) sent.push_back(1000 * rank + 100 * to + row);
    }
    status = call(engine, name, "int32", [&](Channel& channel) {
      alltoall(channel, reinterpret_cast<const char*>(sent.data()), rows_to, sizeof(int32_t),
               [&](const std::vector<size_t>& rows) {
                 rows_from = rows;
                 return reinterpret_cast<char*>(received.data());
               });
    });
    require_ok(status, name);
    size_t index = 0;
    for (int from = 0; from < ranks; ++from) {
      require(rows_from[static_cast<size_t>(from)] == static_cast<size_t>(from + rank), name + ", a number of rows");
      for (int row = 0; row < from + rank; ++row)
        require(received[index++] == 1000 * from + 100 * rank + row, name + ", a row from another rank");
    }
    require(received[index] == -1, name + ", nothing more");
    std::vector<size_t> starts{0};
    for (int to = 0; to < ranks; ++to)
      starts.push_back(to + 1 == ranks ? length
                                       : length * static_cast<size_t>(to + 1) / static_cast<size_t>(ranks + 1));
    const size_t start = starts[static_cast<size_t>(rank)];
    const size_t mine = starts[static_cast<size_t>(rank) + 1] - start;
    status = call(engine, name + ", scattered", "", [&](Channel& channel) {
      reducescatter(channel, reinterpret_cast<const char*>(in.data()), reinterpret_cast<char*>(out.data()), starts,
                    Type::kFloat32, Reduction::kMax, {});
    });
    for (size_t at = 0; at < mine; ++at)
      require(out[at] == value_of(ranks - 1, number, start + at), name + ", a scattered maximum");
  } else if (number % 7 == 5) {
    check_parts(engine, name, number, in, out);
  } else if (number % 5 == 0) {
    std::vector<char> bytes;
    std::vector<size_t> sizes;
    status = call(engine, name, "float32", [&](Channel& channel) {
      const size_t mine = std::min(length, static_cast<size_t>(rank + 1));
      allgather(channel, reinterpret_cast<const char*>(in.data()), mine, sizeof(float),
                [&](const std::vector<size_t>& all) {
                  size_t total = 0;
                  for (size_t one : all) total += one;
                  bytes.resize(total * sizeof(float) + 1);
                  sizes = all;
                  return bytes.data();
                });
    });
    require_ok(status, name);
    status = call(engine, name + ", empty rows", "", [&](Channel& channel) {
      allgather(channel, nullptr, static_cast<size_t>(rank + 3), 0, [&](const std::vector<size_t>& all) {
        for (int from = 0; from < ranks; ++from)
          require(all[static_cast<size_t>(from)] == static_cast<size_t>(from + 3), name + ", a number of empty rows");
        return nullptr;
      });
    });
    size_t start = 0;
    for (int from = 0; from < ranks; ++from) {
      const size_t count = std::min(length, static_cast<size_t>(from + 1));
      require(sizes[static_cast<size_t>(from)] == count, name + ", a size");
      for (size_t index = 0; index < count; ++index) {
        float found;
        std::memcpy(&found, bytes.data() + start + index * sizeof(float), sizeof found);
        require(found == value_of(from, number, index), name + ", a gathered value");
      }
      start += count * sizeof(float);
    }
  } else if (number % 5 == 1) {
    const int root = number % ranks;
    status = call(engine, name, "", [&](Channel& channel) {
      broadcast(channel, reinterpret_cast<const char*>(in.data()), reinterpret_cast<char*>(out.data()),
                length * sizeof(float), root);
    });
    for (size_t index = 0; index < length; ++index)
      require(out[index] == value_of(root, number, index), name + ", a broadcast value");
  } else {
    const bool in_place = number % 5 == 2;
    const size_t half = length / 2;
    float* const to = in_place ? in.data() : out.data();
    std::vector<Span> spans{
        {reinterpret_cast<char*>(in.data()), reinterpret_cast<char*>(to), half},
        {nullptr, nullptr, 0},
        {reinterpret_cast<char*>(in.data() + half), reinterpret_cast<char*>(to + half), length - half}};
    const ScaleFactors factors{number % 2 == 0 ? 1.0 : 2.0, number % 2 == 0 ? 0.5 : 0.25};
    status = call(engine, name, "",
                  Allreduce{Spans(std::move(spans), sizeof(float)), Type::kFloat32, Reduction::kSum, factors});
    for (size_t index = 0; index < length; ++index) {
      float sum = 0;
      for (int from = 0; from < ranks; ++from) sum += value_of(from, number, index);
      require(to[index] == 0.5f * sum, name + ", a sum");
    }
  }
  require_ok(status, name);
}

// The same collectives from several threads, in a different order on each rank.
void run_rank(Engine& engine, int start, int count, int threads) {
  std::vector<std::thread> workers;
  for (int thread = 0; thread < threads; ++thread) {
    workers.emplace_back([&, thread] {
      for (int number = start + thread; number < start + count; number += threads) run_one_collective(engine, number);
    });
  }
  for (std::thread& worker : workers) worker.join();
}

// An average of the float16 value 40,000, whose sum would overflow.
void float16_average(Engine& engine) {
  constexpr uint16_t k40000 = 0x78e2;
  std::vector<uint16_t> halves(5000, k40000);
  char* const data = reinterpret_cast<char*>(halves.data());
  const Status status = call(
      engine, "an average of float16", "",
      Allreduce{Spans({{data, data, halves.size()}}, 2), Type::kFloat16, Reduction::kSum, {1.0, 1.0 / engine.ranks()}});
  require_ok(status, "an average of float16");
  for (const uint16_t half : halves) require(std::abs(half - k40000) <= 2, "an average of float16 does not overflow");
}

// Submits all requests without waiting in between: any order must work.
void submit_all_at_once(Engine& engine, int start, int count) {
  std::vector<int> order;
  for (int number = 0; number < count; ++number) order.push_back(number);
  std::shuffle(order.begin(), order.end(), std::mt19937(static_cast<unsigned>(engine.rank() + 7 * start)));
  std::atomic<int> done{0};
  for (int number : order) {
    auto request = std::make_unique<Request>();
    request->key = key_of("at once " + std::to_string(start + number % (count / 2)));  // each name twice
    request->run = [](Channel& channel) { barrier(channel); };
    request->done = [&](const Status& status) {
      require_ok(status, "at once");
      ++done;
    };
    engine.submit(std::move(request));
  }
  while (done.load() != count) std::this_thread::yield();
}

// The sum over all ranks of the smallest float16 number, whichever thread computes it.
void sum_denormals(Engine& engine) {
  std::vector<uint16_t> in(1000, 1), out(1000);
  const Span all{reinterpret_cast<char*>(in.data()), reinterpret_cast<char*>(out.data()), in.size()};
  const Status status = call(engine, "denormals", "", Allreduce{Spans({all}, 2), Type::kFloat16, Reduction::kSum, {}});
  require_ok(status, "denormals");
  for (const uint16_t sum : out) require(sum == engine.ranks(), "denormals add up: " + std::to_string(sum));
}

// Hosts whose ranks share memory; `host_of` has the host of each rank.
struct Cluster {
  Cluster(const std::vector<int>& host_of, size_t slot_bytes)
      : slot(slot_bytes), placement(make_placement(0, host_of)), network(placement.hosts()) {
    for (const std::vector<int>& ranks : placement.ranks_on) {
      memories.push_back(shared_memory(bytes(static_cast<int>(ranks.size()))));
      const std::string path = "/tmp/core_test." + std::to_string(getpid());
      notifiers.push_back(std::make_unique<Notifier>(path, true));
      unlink(path.c_str());
    }
  }
  ~Cluster() {
    for (size_t host = 0; host < memories.size(); ++host)
      munmap(memories[host], bytes(static_cast<int>(placement.ranks_on[host].size())));
  }
  size_t bytes(int ranks) const { return Engine::bytes(ranks, slot, placement.hosts()); }

  // The parameters of a rank's engine.
  Engine::Shape shape(int rank, const std::vector<int>& host_of, const Costs& costs) {
    Engine::Shape shape{0, {}, slot, true};
    shape.costs = costs;
    shape.placement = make_placement(rank, host_of);
    shape.global_ranks = shape.placement.ranks_on[static_cast<size_t>(shape.placement.host)];
    while (shape.global_ranks[static_cast<size_t>(shape.rank)] != rank) ++shape.rank;
    if (placement.hosts() > 1 && shape.rank == 0)
      shape.link = std::make_unique<InProcessLink>(network, shape.placement.host);
    shape.notifier = notifiers[static_cast<size_t>(shape.placement.host)]->descriptor();
    return shape;
  }
  void* memory_of(int rank, const std::vector<int>& host_of) const {
    return memories[static_cast<size_t>(make_placement(rank, host_of).host)];
  }

  size_t slot;
  std::vector<float> shared;  // by all ranks
  Placement placement;
  InProcessNetwork network;
  std::vector<void*> memories;
  std::vector<std::unique_ptr<Notifier>> notifiers;
};

// A tensor that is alternately small and large, in the same collective.
void small_then_large(Engine& engine) {
  for (int time = 0; time < 40; ++time) {
    std::vector<float> numbers(time % 2 == 0 ? 3 : 30'000, 1.0f);
    char* const data = reinterpret_cast<char*>(numbers.data());
    const Status status =
        call(engine, "small, then large", "[" + std::to_string(numbers.size()) + "]",
             Allreduce{Spans({{data, data, numbers.size()}}, sizeof(float)), Type::kFloat32, Reduction::kSum, {}});
    require_ok(status, "small, then large");
    require(numbers.back() == static_cast<float>(engine.ranks()), "small, then large");
  }
}

// What takes long between hosts is not run by the caller, which may have other things to do.
void leave_to_the_worker(Engine& engine, bool several_hosts) {
  std::thread::id runner;
  const Status status =
      call(engine, "takes long", "", [&](Channel&) { runner = std::this_thread::get_id(); }, {}, size_t{1} << 40);
  require_ok(status, "takes long");
  require(!several_hosts || runner != std::this_thread::get_id(), "the worker thread runs what takes long");
}

// Compressed sums of numbers that change little: they are equal on all ranks, and what a run has rounded is in the
// next.
void sum_in_8_bits(Engine& engine, std::vector<float>& shared) {
  const int ranks = engine.ranks(), rank = engine.rank();
  const size_t counts[] = {1000, 1, 70'000, 255, 0, 3001};  // blocks of several tensors, several segments
  constexpr int kRuns = 20;
  std::vector<std::vector<float>> in, totals;
  for (const size_t count : counts) {
    in.emplace_back(count);
    totals.emplace_back(count, 0.0f);
  }
  const auto number = [](int of_rank, size_t tensor, size_t index) {
    return std::sin(static_cast<float>(index * (tensor + 1) + static_cast<size_t>(97 * of_rank)));
  };
  for (int time = 0; time < kRuns; ++time) {
    std::vector<Span> spans;
    for (size_t tensor = 0; tensor < in.size(); ++tensor) {
      for (size_t index = 0; index < in[tensor].size(); ++index) in[tensor][index] = number(rank, tensor, index);
      char* const data = reinterpret_cast<char*>(in[tensor].data());
      spans.push_back({data, data, in[tensor].size()});
    }
    const Spans all(std::move(spans), sizeof(float));
    const std::shared_ptr<ErrorFeedback> feedback = engine.feedback(key_of("in 8 bits"));
    const Status status = call(engine, "in 8 bits", "", [&](Channel& channel) {
      between_hosts::compressed_allreduce(channel, all, {2.0, 0.25}, *feedback);
    });
    require_ok(status, "in 8 bits");
    if (rank == 0) shared = in[5];
    require_ok(call(engine, "in 8 bits, shared", "", [](Channel& channel) { barrier(channel); }), "in 8 bits, shared");
    require(shared == in[5], "all ranks have the same compressed sums");
    require_ok(call(engine, "in 8 bits, read", "", [](Channel& channel) { barrier(channel); }), "in 8 bits, read");
    for (size_t tensor = 0; tensor < in.size(); ++tensor)
      for (size_t index = 0; index < in[tensor].size(); ++index) totals[tensor][index] += in[tensor][index];
  }
  float error_of_one = 0.0f, error_of_all = 0.0f;
  for (size_t tensor = 0; tensor < in.size(); ++tensor) {
    for (size_t index = 0; index < in[tensor].size(); ++index) {
      float exact = 0.0f;
      for (int from = 0; from < ranks; ++from) exact += 0.5f * number(from, tensor, index);
      error_of_one = std::max(error_of_one, std::abs(in[tensor][index] - exact));
      error_of_all = std::max(error_of_all, std::abs(totals[tensor][index] - kRuns * exact));
    }
  }
  // A number is off by at most a 127th of the largest sum at each of the two roundings, and errors do not add up.
  const float bound = 0.5f * static_cast<float>(ranks) / 127.0f * static_cast<float>(ranks + 1);
  require(error_of_one > 0.0f && error_of_one < bound, "8 bits are off by " + std::to_string(error_of_one));
  require(error_of_all < bound, "20 sums in 8 bits are off by " + std::to_string(error_of_all));
  // Errors that are forgotten stay until the run that uses them has ended, and the next one begins without any.
  std::weak_ptr<ErrorFeedback> forgotten = engine.feedback(key_of("in 8 bits"));
  auto used = forgotten.lock();
  require_ok(call(engine, "in 8 bits, forgotten", "",
                  [&](Channel& channel) {
                    engine.forget_feedback(key_of("in 8 bits"));
                    std::vector<float> numbers(600, 1.0f);
                    char* const data = reinterpret_cast<char*>(numbers.data());
                    const Spans all({{data, data, numbers.size()}}, sizeof(float));
                    between_hosts::compressed_allreduce(channel, all, {}, *used);
                  }),
             "in 8 bits, forgotten");
  require(engine.feedback(key_of("in 8 bits"))->errors.empty(), "errors that are forgotten are new ones");
  used.reset();
  require(forgotten.expired(), "errors that are forgotten are freed");
  engine.forget_feedback(key_of("in 8 bits"));
  const Status invalid = call(engine, "not a number", "", [&](Channel& channel) {
    std::vector<float> numbers(600, 1.0f);
    if (rank == 0) numbers[300] = std::numeric_limits<float>::infinity();
    char* const data = reinterpret_cast<char*>(numbers.data());
    ErrorFeedback none;
    between_hosts::compressed_allreduce(channel, Spans({{data, data, numbers.size()}}, sizeof(float)), {}, none);
    require(std::isfinite(numbers[0]) && std::isnan(numbers[300]) && std::isfinite(numbers[599]),
            "a block is not finite");
  });
  require_ok(invalid, "not a number");
}

// The host of each rank, the costs of messages between hosts, and the size of a slot.
struct Topology {
  std::vector<int> host_of;
  Costs costs = {};
  size_t slot = 64 * 1024;
};

void check(const Topology& topology, double seconds) {
  const std::vector<int>& host_of = topology.host_of;
  const int ranks = static_cast<int>(host_of.size());
  Cluster cluster(host_of, topology.slot);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  std::atomic<bool> go_on{true};
  std::vector<std::thread> all;
  std::atomic<int> collectives{0};
  for (int rank = 0; rank < ranks; ++rank) {
    all.emplace_back([&, rank] {
      Engine engine(cluster.memory_of(rank, host_of), cluster.shape(rank, host_of, topology.costs));
      require(engine.rank() == rank && engine.ranks() == ranks, "the engine's rank and size");
      if (rank % 2 == 0) ScopedDenormals::flush_to_zero();  // the caller's floating-point mode must not matter
      for (int start = 0;; start += 100) {
        run_rank(engine, start, 100, 4);
        submit_all_at_once(engine, start, 50);
        sum_denormals(engine);
        collectives += 150;
        if (rank == 0) go_on = std::chrono::steady_clock::now() < end;
        require_ok(call(engine, "go on", "", [](Channel& channel) { barrier(channel); }), "go on");
        const bool more = go_on;
        require_ok(call(engine, "go on, then", "", [](Channel& channel) { barrier(channel); }), "go on, then");
        if (!more) break;
      }
      float16_average(engine);
      small_then_large(engine);
      if (cluster.placement.hosts() > 1) sum_in_8_bits(engine, cluster.shared);
      leave_to_the_worker(engine, cluster.placement.hosts() > 1 && topology.costs.per_byte > 0);
      const Status mismatch = call(engine, "a mismatch", rank == 1 ? "[2];[3]" : "[2];[4]", [](Channel&) {});
      if (ranks > 1)
        require_failure(mismatch, Code::kMismatch, {"tensor 2 is [", "[3] on rank 1"}, "the mismatch is named");
      // Some ranks have a small allreduce, others a large one. The key must work again after this mismatch.
      for (int time = 0; time < 3; ++time) {
        std::vector<float> numbers(rank % 2 == 0 || time == 1 ? 3 : 30'000, 1.0f);
        char* const data = reinterpret_cast<char*>(numbers.data());
        const Status mixed =
            call(engine, "small and large", "[" + std::to_string(numbers.size()) + "]",
                 Allreduce{Spans({{data, data, numbers.size()}}, sizeof(float)), Type::kFloat32, Reduction::kSum, {}});
        if (ranks == 1 || time == 1) {
          require_ok(mixed, "after a mismatch");
          require(numbers[0] == static_cast<float>(ranks), "after a mismatch");
        } else {
          require_failure(mixed, Code::kMismatch, {"[3] on rank", "[30000] on rank"}, "small and large");
        }
      }
      const Status after = call(engine, "after it", "", [](Channel& channel) { barrier(channel); });
      require_ok(after, "a mismatch ends nothing else");
      std::thread aborting([&] { engine.abort({Code::kAborted, "a test"}); });
      const Status aborted = call(engine, "only rank " + std::to_string(rank), "", [](Channel&) {});
      if (ranks > 1) require_failure(aborted, Code::kAborted, {"a test"}, "aborted");
      aborting.join();
    });
  }
  for (std::thread& thread : all) thread.join();
  std::printf("%d ranks on %d hosts: %d collectives ok\n", ranks, cluster.placement.hosts(), collectives.load());
}

// Runs a body for each of `ranks` ranks of one host, in threads, with the slots that groups use.
template <typename Body>
void run_on_one_host(int ranks, Body&& body) {
  const size_t slot = Channel::slot_bytes_for(ranks), bytes = Channel::bytes(ranks, slot);
  void* const memory = shared_memory(bytes);
  const AbortFlag abort;
  std::vector<std::thread> all;
  for (int rank = 0; rank < ranks; ++rank) {
    all.emplace_back([&, rank] {
      Channel channel(memory, rank, ranks, slot, {1, 0}, abort);
      body(channel, static_cast<size_t>(rank));
    });
  }
  for (std::thread& thread : all) thread.join();
  munmap(memory, bytes);
}

// Memory with guard bytes around it, which a collective must not change.
struct Guarded {
  explicit Guarded(size_t bytes) : all(bytes + 2 * kGuardBytes, kGuardByte) {}
  char* data() { return all.data() + kGuardBytes; }
  void require_untouched(const std::string& name) const {
    require(all[kGuardBytes - 1] == kGuardByte && all[all.size() - kGuardBytes] == kGuardByte,
            name + " writes out of bounds");
  }
  static constexpr size_t kGuardBytes = 64;  // keeps elements aligned
  static constexpr char kGuardByte = 77;
  std::vector<char> all;
};

// A sum of ones, and a reducescatter, on this many ranks. Sources and targets are checked, not the arithmetic: the
// input has 1 in the first byte of each element, and the result must equal that of the reducer, bit for bit.
void check_reductions(int ranks, Type type) {
  const size_t size = size_of(type), all = static_cast<size_t>(ranks), count = 3 * all + 1;
  const std::string name = std::string(name_of(type)) + " on " + std::to_string(ranks) + " ranks";
  std::vector<char> in(count * size), expected(size);
  std::vector<const void*> ones(all);
  for (size_t byte = 0; byte < in.size(); ++byte) in[byte] = static_cast<char>(byte % size == 0);
  std::fill(ones.begin(), ones.end(), in.data());
  reducer_of(type, Reduction::kSum)(expected.data(), ones.data(), ranks, 1, 1.0, 1.0);
  const auto require_sums = [&](Guarded& out, size_t elements, const std::string& what) {
    for (size_t index = 0; index < elements; ++index)
      require(std::memcmp(out.data() + index * size, expected.data(), size) == 0, name + ", " + what);
    out.require_untouched(name + ", " + what);
  };
  run_on_one_host(ranks, [&](Channel& channel, size_t rank) {
    Guarded out(count * size);
    allreduce(channel, Spans({{in.data(), out.data(), count}}, size), type, Reduction::kSum, {});
    require_sums(out, count, "an allreduce");
    std::vector<size_t> starts{0};
    for (size_t to = 0; to < all; ++to) starts.push_back(starts.back() + (to == 0 ? 4 : 3));
    Guarded part((rank == 0 ? 4 : 3) * size);
    reducescatter(channel, in.data(), part.data(), starts, type, Reduction::kSum, {});
    require_sums(part, rank == 0 ? 4 : 3, "a reducescatter");
  });
}

// Collectives without arithmetic, on this many ranks.
void check_data_movement(int ranks) {
  const size_t all = static_cast<size_t>(ranks);
  const std::string name = "on " + std::to_string(ranks) + " ranks, ";
  run_on_one_host(ranks, [&](Channel& channel, size_t rank) {
    const int64_t mine = static_cast<int64_t>(rank);
    int64_t got = -1;
    broadcast(channel, reinterpret_cast<const char*>(&mine), reinterpret_cast<char*>(&got), sizeof got, ranks - 1);
    require(got == ranks - 1, name + "a broadcast");
    std::vector<int64_t> gathered, rows(all), received;
    const auto into = [](std::vector<int64_t>& to) {
      return [&to](const std::vector<size_t>& rows_of_rank) {
        size_t total = 0;
        for (const size_t one : rows_of_rank) total += one;
        to.assign(total, -1);
        return reinterpret_cast<char*>(to.data());
      };
    };
    allgather(channel, reinterpret_cast<const char*>(&mine), 1, sizeof mine, into(gathered));
    for (size_t from = 0; from < all; ++from)
      require(gathered[from] == static_cast<int64_t>(from), name + "an allgather");
    // Ten rows to the next rank, which do not fit into one round, and one row to each other rank.
    std::vector<size_t> rows_to(all, 1);
    rows_to[(rank + 1) % all] = 10;
    rows.assign(all + 9, mine);
    alltoall(channel, reinterpret_cast<const char*>(rows.data()), rows_to, sizeof mine, into(received));
    size_t index = 0;
    for (size_t from = 0; from < all; ++from) {
      for (size_t row = 0; row < ((from + 1) % all == rank ? 10 : 1); ++row)
        require(received[index++] == static_cast<int64_t>(from), name + "an alltoall");
    }
    require(index == received.size(), name + "an alltoall of no more");
    barrier(channel);
  });
}

// Each kind of collective on a thousand ranks of one host, and each type at the number of ranks from which a rank's
// part of a slot has fewer than 64 elements.
void check_many_ranks(int most) {
  for (const Type type : {Type::kFloat32, Type::kFloat64, Type::kInt32, Type::kUint8, Type::kInt16, Type::kInt8,
                          Type::kComplex64, Type::kInt64, Type::kBool, Type::kBfloat16, Type::kUint16,
                          Type::kComplex128, Type::kFloat16, Type::kUint32, Type::kUint64}) {
    const size_t size = size_of(type);
    const int ranks = size == 16 ? 129 : size == 8 ? 182 : size == 4 ? 257 : size == 2 ? 513 : 1025;
    if (ranks <= most) check_reductions(ranks, type);
  }
  if (most >= 1024) check_reductions(1024, Type::kComplex128);
  check_data_movement(std::min(most, 1024));
  require(Channel::slot_bytes_for(5000) >= 5000 * Channel::kLine, "slots have a line for each rank");
  std::printf("up to %d ranks on one host: ok\n", most);
}

// Once a flag is raised, its reason is available, however many threads raise it at once.
void check_aborts() {
  for (int time = 0; time < 2000; ++time) {
    AbortFlag abort;
    std::atomic<int> ready{0};
    std::vector<std::thread> all;
    for (int number = 0; number < 3; ++number) {
      all.emplace_back([&] {
        ++ready;
        while (ready.load() != 3) {
        }
        abort.raise({Code::kAborted, "a reason that is too long for the string itself"});
        require(abort.raised() && abort.status().code() == Code::kAborted, "a failure is there with the flag");
      });
    }
    for (std::thread& thread : all) thread.join();
  }
  AbortFlag nameless;
  nameless.raise({Code::kFailed, ""});
  require(!nameless.status().ok() && *nameless.status().text() != 0, "a failure without a text has one all the same");
}

// Two ranks on one host, both used by this thread.
struct Pair {
  explicit Pair(size_t slot = 64 * 1024)
      : bytes(Engine::bytes(2, slot)),
        memory(shared_memory(bytes)),
        ranks{std::make_unique<Engine>(memory, Engine::Shape{0, {0, 1}, slot, true}),
              std::make_unique<Engine>(memory, Engine::Shape{1, {0, 1}, slot, true})} {}
  ~Pair() {
    for (auto& rank : ranks) rank.reset();
    munmap(memory, bytes);
  }

  // Submits a request, whose status is stored in `ended` by its name.
  void submit(int rank, const std::string& name, const std::string& details, std::function<void(Channel&)> run) {
    auto request = std::make_unique<Request>();
    request->key = key_of(name);
    request->details = details;
    request->run = std::move(run);
    request->done = [this, rank, name](const Status& status) {
      const std::lock_guard<std::mutex> lock(mutex);
      ended[rank][name] = status;
      changed.notify_all();
    };
    ranks[rank]->submit(std::move(request));
  }
  // Blocks each rank in a collective until `unblock`.
  void block() {
    for (int rank = 0; rank < 2; ++rank)
      blockers[rank] = std::thread([this, rank] {
        submit(rank, "hold", "", [this](Channel&) {
          ++blocked;
          while (!is_unblocked) std::this_thread::yield();
        });
      });
    while (blocked.load() != 2) std::this_thread::yield();
  }
  void unblock() {
    is_unblocked = true;
    for (std::thread& blocker : blockers) blocker.join();
  }
  void wait(size_t results) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return ended[0].size() >= results && ended[1].size() >= results; });
  }

  size_t bytes;
  void* memory;
  std::unique_ptr<Engine> ranks[2];
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::string, Status> ended[2];
  std::thread blockers[2];
  std::atomic<int> blocked{0};
  std::atomic<bool> is_unblocked{false};
};

// Requests that are submitted while a long collective keeps the ranks from reading the log.
void check_blocked_engine() {
  const std::function<void(Channel&)> no_op = [](Channel&) {};
  {  // more mismatches than stored texts: no text is mixed up
    constexpr size_t kMany = 100;
    Pair pair;
    pair.block();
    for (size_t number = 0; number < kMany; ++number) {
      for (int rank = 0; rank < 2; ++rank)
        pair.submit(rank, "mismatch " + std::to_string(number), std::to_string(number) + (rank == 0 ? " a" : " b"),
                    no_op);
    }
    pair.unblock();
    pair.wait(kMany + 1);
    for (auto& ended : pair.ended) {
      size_t named = 0, unnamed = 0;
      for (size_t number = 0; number < kMany; ++number) {
        const Status& status = ended["mismatch " + std::to_string(number)];
        require_failure(status, Code::kMismatch, {}, "a mismatch");
        const std::string text = status.text();
        named += text.find(" is " + std::to_string(number) + " a on rank 0") != std::string::npos;
        unnamed += text.find("were unread") != std::string::npos;
      }
      require(named == 64 && unnamed == kMany - 64, "each text is its own: " + std::to_string(named));
    }
    pair.submit(0, "later", "c", no_op);
    pair.submit(1, "later", "d", no_op);
    pair.wait(kMany + 2);
    require_failure(pair.ended[1]["later"], Code::kMismatch, {" is c on rank 0"}, "texts that were read make room");
  }
  {  // more collectives than the log holds: an error, and no wrong order
    Pair pair;
    pair.block();
    for (uint32_t number = 0; number < Matching::kLogCapacity + 2; ++number) {
      for (int rank = 0; rank < 2; ++rank) pair.submit(rank, std::to_string(number), "", no_op);
    }
    pair.unblock();
    pair.wait(Matching::kLogCapacity + 3);
    for (auto& ended : pair.ended)
      require_failure(ended[std::to_string(Matching::kLogCapacity)], Code::kFailed, {"too many collectives"},
                      "a full log");
  }
  {  // closed while a thread is in a collective that another rank never joins
    Pair pair;
    pair.submit(1, "waits", "", [&](Channel&) {
      while (!pair.is_unblocked) std::this_thread::yield();
    });
    std::thread waiting([&] { pair.submit(0, "waits", "", [](Channel& channel) { barrier(channel); }); });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    pair.ranks[0]->close({Code::kFailed, "it is over"});
    waiting.join();
    pair.is_unblocked = true;
    pair.wait(1);
    require_failure(pair.ended[0]["waits"], Code::kFailed, {"it is over"}, "a closed group");
    pair.submit(0, "after it", "", no_op);
    require_failure(pair.ended[0]["after it"], Code::kFailed, {"it is over"}, "after its end");
  }
  {  // exceptions other than Failure are reported as well
    Pair pair;
    for (int rank = 0; rank < 2; ++rank) pair.submit(rank, "no memory", "", [](Channel&) { throw std::bad_alloc(); });
    pair.wait(1);
    for (auto& ended : pair.ended)
      require_failure(ended["no memory"], Code::kFailed, {"out of memory"}, "out of memory");
  }
  std::printf("blocked ranks: ok\n");
}

// The leaders of three hosts: the first two measure the costs of messages.
void check_cost_measurement() {
  InProcessNetwork network(3);
  std::vector<Costs> found(3);
  std::vector<std::thread> leaders;
  for (int host = 0; host < 3; ++host) {
    leaders.emplace_back([&, host] {
      InProcessLink link(network, host);
      found[static_cast<size_t>(host)] = measure_costs(link, host, 3, 60.0);
    });
  }
  for (std::thread& leader : leaders) leader.join();
  require(found[0].latency > 0 && found[0].per_message >= 0 && found[0].per_byte >= 0, "costs are measured");
  require(found[1].latency == 0 && found[2].latency == 0, "one of a pair measures");
  InProcessLink alone(network, 0);  // its neighbor does not answer
  bool failed = false;
  try {
    measure_costs(alone, 0, 2, 0.05);
  } catch (const Failure&) {
    failed = true;
  }
  require(failed, "measuring has an end");
}

// The choice of the algorithm, on networks where it is obvious.
void check_algorithms() {
  using between_hosts::Algorithm;
  using between_hosts::choose_algorithm;
  constexpr size_t kArea = 512 * 1024, kKilo = 1024;
  const Costs ethernet{25e-6, 4e-6, 0.8e-9}, slow{25e-6, 4e-6, 80e-9};
  const auto algorithm = [&](size_t bytes, int hosts, const Costs& costs, Type type = Type::kFloat32) {
    return choose_algorithm(bytes, type, hosts, kArea, costs);
  };
  require(algorithm(4 * kKilo, 2, ethernet) == Algorithm::kUnordered &&
              algorithm(4 * kKilo, 4, ethernet) == Algorithm::kUnordered,
          "small");
  require(algorithm(64 * kKilo, 2, ethernet) == Algorithm::kDirect, "medium, two hosts");
  require(algorithm(16 * kKilo, 4, slow) == Algorithm::kReduceScatter, "low bandwidth");
  require(algorithm(kKilo, 256, ethernet) == Algorithm::kRecursiveDoubling &&
              algorithm(kKilo, 256, slow) == Algorithm::kRecursiveDoubling,
          "many hosts");
  require(algorithm(kKilo, 256, ethernet, Type::kBfloat16) != Algorithm::kRecursiveDoubling,
          "half precision is rounded once");
  require(algorithm(16 * kKilo * kKilo, 2, ethernet) == Algorithm::kReduceScatter, "large");
  require(algorithm(16 * kKilo * kKilo, 256, slow) == Algorithm::kReduceScatter, "large, many hosts");
}

void check_half_precision() {
  for (const char* name : {"plain", "avx2", "avx512"}) {
    if (!use_instruction_set(name)) continue;
    // Every float16 and bfloat16 plus zero is unchanged, and NaNs stay NaNs.
    for (const Type type : {Type::kFloat16, Type::kBfloat16}) {
      std::vector<uint16_t> all(65536), zero(65536, 0), out(65536);
      for (size_t bits = 0; bits < all.size(); ++bits) all[bits] = static_cast<uint16_t>(bits);
      const void* in[] = {all.data(), zero.data()};
      reducer_of(type, Reduction::kSum)(out.data(), in, 2, all.size(), 1.0, 1.0);
      const unsigned exponent = type == Type::kFloat16 ? 0x7c00u : 0x7f80u;
      for (size_t bits = 0; bits < all.size(); ++bits) {
        const bool nan = (bits & 0x7fffu) > exponent;
        const bool minus_zero = bits == 0x8000u;
        require(nan          ? (out[bits] & 0x7fffu) > exponent
                : minus_zero ? out[bits] == 0
                             : out[bits] == bits,
                std::string(name) + ", " + name_of(type) + " " + std::to_string(bits));
      }
    }
    std::printf("%s: half precision ok\n", name);
  }
}

void check_quantizers() {
  constexpr size_t kCount = 5 * kScaledElements + 100;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> numbers(kCount), decoded(kCount);
  for (float& number : numbers) number = normal(random);
  std::fill_n(numbers.begin() + kScaledElements, kScaledElements, 0.0f);
  numbers[2 * kScaledElements + 7] = std::numeric_limits<float>::quiet_NaN();
  for (size_t i = 3 * kScaledElements; i < 4 * kScaledElements; ++i) numbers[i] *= 1e-38f;
  std::vector<char> expected;
  for (const char* name : {"plain", "avx2", "avx512"}) {
    if (!use_instruction_set(name)) continue;
    const std::string what = std::string(name) + ", 8 bits, ";
    std::vector<float> errors(kCount, 0.25f);
    std::vector<char> encoded(encoded_bytes(kCount)), sums(encoded_bytes(kCount));
    quantizer().encode(encoded.data(), numbers.data(), errors.data(), kCount, 2.0f, nullptr, 0, 3);
    quantizer().decode(decoded.data(), encoded.data(), kCount, 0.5f);
    for (size_t i = 0; i < kCount; ++i) {
      const size_t block = i / kScaledElements;
      const float exact = 2.0f * numbers[i] + 0.25f;
      if (block == 2) {
        require(std::isnan(decoded[i]) && errors[i] == 0.25f, what + "a block that is not finite");
      } else {
        require(std::abs(2.0f * decoded[i] + errors[i] - exact) < 1e-5f, what + "the errors are kept");
        require(std::abs(errors[i]) < 0.1f, what + "the errors are small");
      }
    }
    if (expected.empty()) expected = encoded;
    require(expected == encoded, what + "all processors round alike");
    // Rounding is right on average, and adds up with other blocks.
    constexpr int kTimes = 2000;
    std::vector<double> mean(kCount);
    const char* const others[] = {encoded.data()};
    std::vector<float> same(kCount, 0.3f);
    same[0] = 1.0f;
    for (uint32_t time = 0; time < kTimes; ++time) {
      std::vector<float> none(kCount, 0.0f);
      quantizer().encode(sums.data(), same.data(), none.data(), 100, 1.0f, others, 1, time * 7919);
      quantizer().decode(decoded.data(), sums.data(), 100, 1.0f);
      for (size_t i = 0; i < 100; ++i) mean[i] += static_cast<double>(decoded[i]) / kTimes;
    }
    quantizer().decode(decoded.data(), encoded.data(), 100, 1.0f);
    for (size_t i = 0; i < 100; ++i)
      require(std::abs(mean[i] - static_cast<double>(decoded[i] + same[i])) < 0.003, what + "rounding is unbiased");
    std::printf("%s: 8 bits ok\n", name);
  }
}

}  // namespace

int main(int count, char** arguments) {
  const std::string what = count > 1 ? arguments[1] : "check";
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  if (what == "time") {
    time_all(count > 2 ? std::atoi(arguments[2]) : 2);
    return 0;
  }
  if (what == "many") {
    check_many_ranks(1025);
    return 0;
  }
  const double seconds = count > 2 ? std::atof(arguments[2]) : 2.0;
  check_half_precision();
  check_quantizers();
  check_cost_measurement();
  check_algorithms();
  check_aborts();
  check_blocked_engine();
#if defined(__SANITIZE_THREAD__)
  check_many_ranks(40);  // more threads take minutes under ThreadSanitizer
#else
  check_many_ranks(257);
#endif
  // Networks on which one algorithm is the best for all sizes: direct, reduce-scatter, recursive doubling.
  const Costs high_latency{1.0, 0.0, 0.0}, low_bandwidth{0.0, 0.0, 1.0}, high_overhead{0.0, 1.0, 0.0};
  const std::vector<Topology> topologies{
      {{0}},
      {{0, 0}},
      {{0, 0, 0}},
      {{0, 0, 0, 0}},
      {{0, 1}},
      {{0, 1}, high_latency},
      {{0, 1, 0}},
      {{0, 1, 0, 2}, low_bandwidth},
      {{0, 0, 1, 2, 2}},
      {{0, 0, 1, 2, 2}, high_latency},
      {{0, 1, 0, 1, 0, 2}},
      {{0, 0, 0, 1, 2, 1, 2, 1, 2, 0, 0, 0}, {}, 16 * 1024},  // too many blocks for one round of alltoall
      {{0, 1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10}, high_overhead}};
  for (const Topology& index : topologies) check(index, seconds / static_cast<double>(topologies.size()));
  return 0;
}
