// How the leaders of a group's hosts reach each other: the core's one view of a network.
//
// A group has one leader on each host, and one of its threads at a time uses the link. Nothing waits here but `sleep`:
// who sent or asked for something calls `progress` and looks again until it is there. Functions throw Failure where the
// network fails.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hvkeras {

class Link {
 public:
  // Something that is under way; nullptr is done already.
  using Handle = void*;
  // Data of different streams may pass each other.
  enum Stream { kData, kParts, kResults };

  virtual ~Link() = default;

  // Sends a short message, which arrives when it does; those between two hosts stay in order.
  virtual void send_message(int host, std::vector<char> message) = 0;
  // Takes a message that has arrived, and says whence; returns whether there was one.
  virtual bool try_receive_message(std::vector<char>* message, int* host) = 0;

  // Starts to send or to receive data. What one host sends to another in a stream is received in the order in which it
  // was sent, in pieces of the same sizes. The memory must stay until `done` has said yes, which forgets the ticket, or
  // until `give_up`.
  virtual Handle send(int host, Stream stream, const void* data, size_t bytes) = 0;
  virtual Handle receive(int host, Stream stream, void* data, size_t bytes) = 0;
  virtual bool done(Handle handle) = 0;

  // Moves on what is under way.
  virtual void progress() = 0;
  // Whether all that was sent has left this process; the rest needs further progress.
  virtual bool all_sent() = 0;
  // Sleeps until something is to be moved on, or somebody writes to `notifier` (see Notifier), for at most so long.
  virtual void sleep(int64_t microseconds, int notifier) = 0;
  // Ends all that is under way, whose memory is free then. Nothing can be sent or received any more.
  virtual void abort() = 0;
};

}  // namespace hvkeras
