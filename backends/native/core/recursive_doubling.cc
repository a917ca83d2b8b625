#include "recursive_doubling.h"

namespace hvkeras::between_hosts {

void recursive_doubling_allreduce(Hosts& hosts, char* data, size_t count, Type type, Reduction reduction,
                                  ScaleFactors across_hosts) {
  const Reducer reduce = reducer_of(type, reduction);
  const size_t bytes = count * size_of(type);
  char* const received = hosts.leader_memory(bytes);
  const int me = hosts.host();
  const auto exchange = [&](int host, bool sends, bool receives) {
    if (receives) hosts.receive(host, received, bytes);
    if (sends) hosts.send(host, data, bytes);
    hosts.wait(hosts.take_started());
  };
  // Operands are in the same order on both hosts, so that the results are bitwise identical.
  const auto reduce_with = [&](int host, ScaleFactors factors) {
    const void* const sources[] = {host < me ? received : data, host < me ? data : received};
    reduce(data, sources, 2, count, factors.prescale, factors.postscale);
  };
  int power_of_two = 1;  // the hosts that participate in all steps
  while (2 * power_of_two <= hosts.hosts()) power_of_two *= 2;
  const int remainder = hosts.hosts() - power_of_two;
  if (me >= power_of_two) {  // sends its data to another host, and receives the result from it
    exchange(me - power_of_two, true, false);
    exchange(me - power_of_two, false, true);
    copy(data, received, bytes);
    return;
  }
  if (me < remainder) {
    exchange(me + power_of_two, false, true);
    reduce_with(me + power_of_two, {1.0, 1.0});
  }
  for (int distance = 1; distance < power_of_two; distance *= 2) {
    const int host = me ^ distance;
    exchange(host, true, true);
    reduce_with(host, {1.0, 2 * distance == power_of_two ? across_hosts.postscale : 1.0});
  }
  if (me < remainder) exchange(me + power_of_two, true, false);
}

}  // namespace hvkeras::between_hosts
