#include "doubling.h"

namespace hvkeras::between_hosts {

void double_up(Hosts& hosts, char* data, size_t count, Type type, Reduction reduction, Factors among_hosts) {
  const Reducer reduce = reducer_of(type, reduction);
  const size_t bytes = count * size_of(type);
  char* const other = hosts.own_memory(bytes);
  const int me = hosts.host();
  const auto exchange = [&](int host, bool sends, bool receives) {
    if (receives) hosts.receive(host, other, bytes);
    if (sends) hosts.send(host, data, bytes);
    hosts.await(hosts.started());
  };
  // The same order of both hosts' numbers on both, so that both have the same bits.
  const auto add = [&](int host, Factors factors) {
    const void* const sources[] = {host < me ? other : data, host < me ? data : other};
    reduce(data, sources, 2, count, factors.before, factors.after);
  };
  int paired = 1;  // the hosts that take part in all steps: the largest power of two
  while (2 * paired <= hosts.hosts()) paired *= 2;
  const int extra = hosts.hosts() - paired;
  if (me >= paired) {  // hands its own to another host, and gets the result
    exchange(me - paired, true, false);
    exchange(me - paired, false, true);
    copy(data, other, bytes);
    return;
  }
  if (me < extra) {
    exchange(me + paired, false, true);
    add(me + paired, {1.0, 1.0});
  }
  for (int distance = 1; distance < paired; distance *= 2) {
    const int host = me ^ distance;
    exchange(host, true, true);
    add(host, {1.0, 2 * distance == paired ? among_hosts.after : 1.0});
  }
  if (me < extra) exchange(me + paired, true, false);
}

}  // namespace hvkeras::between_hosts
