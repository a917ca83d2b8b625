// How the leaders of a group's hosts reach each other: the core's one view of a network.
//
// A group has one leader on each host. Nothing here waits: who sent or asked for something looks again until it is
// there. What was sent moves on by itself, whether anybody looks or not. Functions throw Failure where the network
// fails.
#pragma once

#include <cstddef>

namespace hvkeras {

class Link {
 public:
  // Something that is under way.
  using Ticket = void*;

  virtual ~Link() = default;

  // Sends a short message, all of one size, which arrives when it does; those between two hosts stay in order.
  virtual void tell(int host, const void* message, size_t bytes) = 0;
  // Takes a message that has arrived, and says whence; returns whether there was one.
  virtual bool hear(void* message, size_t bytes, int* host) = 0;

  // Starts to send or to receive data. What one host sends to another is received in the order in which it was sent, in
  // pieces of the same sizes. The memory must stay until `done` has said yes, which forgets the ticket.
  virtual Ticket send(int host, const void* data, size_t bytes) = 0;
  virtual Ticket receive(int host, void* data, size_t bytes) = 0;
  virtual bool done(Ticket ticket) = 0;
};

}  // namespace hvkeras
