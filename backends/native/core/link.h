// The network between the leaders of a group's hosts: the core's transport interface.
//
// A group has one leader on each host, and one of its threads uses the link at a time. Only `sleep` blocks: callers
// start a transfer, then call `progress` and `done` until it is finished. Functions throw Failure if the network fails.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hvkeras {

class Link {
 public:
  // A transfer in flight; nullptr if it has finished already.
  using Handle = void*;
  // Transfers of different streams are not ordered.
  enum Stream { kData, kParts, kResults };

  virtual ~Link() = default;

  // Sends a short message, without waiting. Messages between two hosts stay in order.
  virtual void send_message(int host, std::vector<char> message) = 0;
  // Receives a message that has arrived, and its sender. Returns whether there was one.
  virtual bool try_receive_message(std::vector<char>* message, int* host) = 0;

  // Start to send or receive data. Within a stream, data from one host to another is received in the order in which it
  // was sent, in pieces of the same sizes. The memory must stay valid until `done` returns true, which releases the
  // handle, or until `abort`.
  virtual Handle send(int host, Stream stream, const void* data, size_t bytes) = 0;
  virtual Handle receive(int host, Stream stream, void* data, size_t bytes) = 0;
  virtual bool done(Handle handle) = 0;

  // Makes progress on transfers in flight.
  virtual void progress() = 0;
  // Whether all data has left this process. If not, further progress is needed.
  virtual bool all_sent() = 0;
  // Sleeps until there are network events, or `notifier` is notified (see Notifier), at most this long.
  virtual void sleep(int64_t microseconds, int notifier) = 0;
  // Cancels all transfers; afterwards their memory may be freed. Nothing can be sent or received any more.
  virtual void abort() = 0;
};

}  // namespace hvkeras
