#include "mpi_link.h"

#include <algorithm>
#include <iterator>
#include <list>
#include <string>

#include "core/waiting.h"

namespace hvkeras {

namespace {

void require(const char* error) {
  if (error != nullptr) throw Failure(error);
}

class MpiLink : public Link {
 public:
  MpiLink(const HvkerasNetwork& network, int64_t group, const std::vector<int>& leaders)
      : network_(network), messages_(static_cast<int>(2 * group)), data_(messages_ + 1), leaders_(leaders) {
    if (2 * group + 1 >= network.tags)
      throw Failure("there are too many process sets for MPI. Received: " + std::to_string(group));
  }
  // What is still under way stays: an abort cut it off, and MPI may yet look at it.
  ~MpiLink() override {
    try {
      sweep();
    } catch (const Failure&) {
    }
    for (auto& told : told_) told.message.release();
  }

  void tell(int host, const void* message, size_t bytes) override {
    sweep();
    const char* const start = static_cast<const char*>(message);
    told_.push_back({std::make_unique<std::vector<char>>(start, start + bytes), nullptr});
    Told& told = told_.back();
    require(network_.send(leader(host), messages_, told.message->data(), bytes, &told.transfer));
  }

  bool hear(void* message, size_t bytes, int* host) override {
    sweep();
    int rank = -1;
    require(network_.take(messages_, message, bytes, &rank));
    *host = static_cast<int>(std::find(leaders_.begin(), leaders_.end(), rank) - leaders_.begin());
    return rank >= 0;
  }

  Ticket send(int host, const void* data, size_t bytes) override {
    Ticket ticket = nullptr;
    require(network_.send(leader(host), data_, data, bytes, &ticket));
    return ticket;
  }

  Ticket receive(int host, void* data, size_t bytes) override {
    Ticket ticket = nullptr;
    require(network_.receive(leader(host), data_, data, bytes, &ticket));
    return ticket;
  }

  bool done(Ticket ticket) override {
    int is_done = 0;
    require(network_.test(ticket, &is_done));
    return is_done != 0;
  }

 private:
  struct Told {
    std::unique_ptr<std::vector<char>> message;
    void* transfer;
  };

  int leader(int host) const { return leaders_[static_cast<size_t>(host)]; }

  // Forgets the messages that have gone out.
  void sweep() {
    for (auto told = told_.begin(); told != told_.end();)
      told = done(told->transfer) ? told_.erase(told) : std::next(told);
  }

  const HvkerasNetwork& network_;
  const int messages_, data_;  // tags
  const std::vector<int> leaders_;
  std::list<Told> told_;
};

}  // namespace

std::unique_ptr<Link> mpi_link(const HvkerasNetwork& network, int64_t group, const std::vector<int>& leaders) {
  return std::make_unique<MpiLink>(network, group, leaders);
}

}  // namespace hvkeras
