// Times allreduces, alternating with a naive program and with the copies and additions alone.
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include "engine_calls.h"

namespace hvkeras {

namespace {

// The copies and additions of one rank in an in-place allreduce of floats, segment by segment. `memory` has the layout
// of the channel's slots and results, but is not shared: no rank waits, and no cache line moves between cores.
void copy_and_add(char* memory, int rank, int ranks, char* tensor, size_t bytes) {
  const size_t part = Channel::slot_bytes_for(ranks) / static_cast<size_t>(ranks) / 4096 * 4096;
  const size_t slot = part * static_cast<size_t>(ranks);
  const Reducer reduce = reducer_of(Type::kFloat32, Reduction::kSum);
  std::vector<const void*> sources(static_cast<size_t>(ranks));
  for (size_t start = 0, turn = 0; start < bytes; start += slot, turn ^= 1) {
    const auto slot_of = [&](int of) {
      return memory + (turn * static_cast<size_t>(ranks) + static_cast<size_t>(of)) * slot;
    };
    char* const results = memory + 2 * static_cast<size_t>(ranks) * slot + turn * slot;
    const auto offset = [&](int of) { return static_cast<size_t>(of) * part; };
    const auto length = [&](int of) { return std::min(part, bytes - std::min(bytes, start + offset(of))); };
    for (int other = 0; other < ranks; ++other) {
      if (other != rank) copy(slot_of(rank) + offset(other), tensor + start + offset(other), length(other));
    }
    for (int of = 0; of < ranks; ++of)
      sources[static_cast<size_t>(of)] = of == rank ? tensor + start + offset(rank) : slot_of(of) + offset(rank);
    reduce(results + offset(rank), sources.data(), ranks, length(rank) / sizeof(float), 1.0, 1.0);
    copy(tensor + start + offset(rank), results + offset(rank), length(rank));
    for (int other = 0; other < ranks; ++other) {
      if (other != rank) copy(tensor + start + offset(other), results + offset(other), length(other));
    }
  }
}

// A naive in-place allreduce of floats: the same copies and additions through shared memory as large as the tensors,
// with three barriers.
class Naive {
 public:
  static size_t bytes(int ranks, size_t largest) { return 64 + (static_cast<size_t>(ranks) + 1) * largest; }
  Naive(void* memory, int rank, int ranks, size_t largest)
      : arrivals_(*static_cast<std::atomic<uint32_t>*>(memory)),
        data_(static_cast<char*>(memory) + 64),
        rank_(rank),
        ranks_(ranks),
        largest_(largest) {}
  void allreduce(char* tensor, size_t bytes) {
    const size_t part = bytes / sizeof(float) / static_cast<size_t>(ranks_) * sizeof(float);
    const size_t own = static_cast<size_t>(rank_) * part;
    const size_t own_bytes = rank_ + 1 == ranks_ ? bytes - own : part;
    char* const results = data_ + static_cast<size_t>(ranks_) * largest_;
    std::memcpy(input_of(rank_), tensor, own);
    std::memcpy(input_of(rank_) + own + own_bytes, tensor + own + own_bytes, bytes - own - own_bytes);
    barrier();
    std::vector<const void*> sources;
    for (int of = 0; of < ranks_; ++of) sources.push_back((of == rank_ ? tensor : input_of(of)) + own);
    reducer_of(Type::kFloat32, Reduction::kSum)(results + own, sources.data(), ranks_, own_bytes / sizeof(float), 1.0,
                                                1.0);
    barrier();
    std::memcpy(tensor, results, bytes);
    barrier();
  }

 private:
  char* input_of(int rank) const { return data_ + static_cast<size_t>(rank) * largest_; }
  void barrier() {
    expected_ += static_cast<uint32_t>(ranks_);
    arrivals_.fetch_add(1);
    for (int spin = 0; static_cast<int32_t>(arrivals_.load() - expected_) < 0; ++spin)
      if (spin > 10'000) sched_yield();
  }

  std::atomic<uint32_t>& arrivals_;
  char* data_;
  int rank_, ranks_;
  size_t largest_;
  uint32_t expected_ = 0;
};

struct Times {
  double engine, naive, copies;  // medians in microseconds, on rank 0
};

// Times in-place allreduces of `bytes`, alternating with the naive program, and the copies and additions alone.
Times times_of(Engine& engine, Naive& naive_program, size_t bytes, int repeats) {
  std::vector<float> tensor(bytes / sizeof(float), 0.0f);
  const size_t ranks = static_cast<size_t>(engine.ranks());
  std::vector<char> memory((2 * ranks + 2) * Channel::slot_bytes_for(engine.ranks()));
  char* const data = reinterpret_cast<char*>(tensor.data());
  std::vector<double> engines, naive_times, copies;
  const auto timed = [](std::vector<double>& times, const std::function<void()>& run) {
    const auto start = std::chrono::steady_clock::now();
    run();
    times.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
  };
  const auto median = [](std::vector<double>& times) {
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  };
  for (int repeat = 0; repeat < repeats; ++repeat) {
    timed(engines, [&] {
      const Status status =
          call(engine, "timed", "",
               Allreduce{Spans({{data, data, tensor.size()}}, sizeof(float)), Type::kFloat32, Reduction::kSum, {}});
      require_ok(status, "timed");
    });
    const auto synchronize = [&] {
      const Status status = call(engine, "meet", "", [](Channel& channel) { barrier(channel); });
      require_ok(status, "timed");
    };
    synchronize();
    timed(naive_times, [&] { naive_program.allreduce(data, bytes); });
    synchronize();
    timed(copies, [&] { copy_and_add(memory.data(), engine.rank(), engine.ranks(), data, bytes); });
  }
  return {median(engines), median(naive_times), median(copies)};
}

// Pins this process to one of its allowed cores, if there is one for each rank.
void pin_to_core(int rank, int ranks) {
  cpu_set_t all, one;
  require(sched_getaffinity(0, sizeof all, &all) == 0, "sched_getaffinity");
  if (CPU_COUNT(&all) < ranks) return;
  CPU_ZERO(&one);
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &all) && rank-- == 0) CPU_SET(core, &one);
  }
  require(sched_setaffinity(0, sizeof one, &one) == 0, "sched_setaffinity");
}

}  // namespace

void time_all(int ranks) {
  const size_t slot_bytes = Channel::slot_bytes_for(ranks);
  void* const memory = shared_memory(Engine::bytes(ranks, slot_bytes));
  const size_t largest = 64u << 20;
  void* const shared = shared_memory(Naive::bytes(ranks, largest));
  const bool oversubscribed = ranks > sysconf(_SC_NPROCESSORS_ONLN);
  const auto run = [&](int rank) {
    pin_to_core(rank, ranks);
    Engine engine(memory, {rank, numbered(ranks), slot_bytes, oversubscribed});
    Naive naive_program(shared, rank, ranks, largest);
    for (size_t bytes = 4096; bytes <= largest; bytes *= 4) {
      const Times times = times_of(engine, naive_program, bytes, bytes < (4u << 20) ? 500 : 30);
      if (rank == 0)
        std::printf(
            "%9zu bytes %10.1f us %7.2f GB/s; a naive program %10.1f us, %3.0f %% of that; the copies and"
            " additions alone %10.1f us, %3.0f %%\n",
            bytes, times.engine, static_cast<double>(bytes) / times.engine / 1000, times.naive,
            100 * times.naive / times.engine, times.copies, 100 * times.copies / times.engine);
    }
  };
  for (int rank = 1; rank < ranks; ++rank) {
    if (fork() == 0) {
      run(rank);
      _exit(0);
    }
  }
  run(0);
  while (wait(nullptr) > 0) {
  }
}

}  // namespace hvkeras
