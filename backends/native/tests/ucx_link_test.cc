// Two ends of a UCX link in one process, with injected UCX failures: no failure may be taken for success, and nothing
// may be written to freed memory. The argument is UCX's folder. Exits with 1 if a check fails.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>

#include "../core/synchronization.h"
#include "../ucx/link.h"

using namespace hvkeras;

namespace {

constexpr auto kFailure = static_cast<ucx::UcsStatus>(-3);  // UCS_ERR_IO_ERROR
const ucx::Api* real = nullptr;
thread_local bool fails_requests = false, fails_receives = false, fails_flushes = false;

void* failed() { return reinterpret_cast<void*>(static_cast<intptr_t>(kFailure)); }

ucx::Api failing() {
  ucx::Api api = *real;
  api.request_status = [](void* request) { return fails_requests ? kFailure : real->request_status(request); };
  api.message_receive = [](ucx::Worker* worker, void* data, size_t bytes, ucx::Message* message,
                           const ucx::RequestParameters* parameters) {
    return fails_receives ? failed() : real->message_receive(worker, data, bytes, message, parameters);
  };
  api.worker_flush = [](ucx::Worker* worker, const ucx::RequestParameters* parameters) {
    return fails_flushes ? failed() : real->worker_flush(worker, parameters);
  };
  return api;
}

void require(bool holds, const char* what) {
  if (holds) return;
  std::printf("FAILED: %s\n", what);
  std::exit(1);
}

Status failure_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Failure& failure) {
    return failure.status();
  }
  return Status();
}

void require_failure(const Status& found, Code code, const char* text) {
  require(found.code() == code && std::strncmp(found.text(), text, std::strlen(text)) == 0, found.text());
}

// Two ends on the loopback interface. The first one fails where a test requests it.
struct Ends {
  ucx::Api api = failing();
  ucx::UcxLink one{api, kSettings, 2}, other{api, kSettings, 2};

  static constexpr const char* kSettings = "NET_DEVICES=lo\nTLS=tcp\nTCP_CONN_NB=y\nRNDV_THRESH=inf";
  void connect(ucx::UcxLink& link, int host) {
    link.connect(host, {one.address(), other.address()}, {"the first", "the second"}, 7, 20);
  }
  void connect() {
    std::thread second([this] { connect(other, 1); });
    connect(one, 0);
    second.join();
  }
};

void failed_receive_reports_failed_peer() {
  Ends ends;
  ends.connect();
  ends.other.send_message(0, std::vector<char>(100));
  std::vector<char> message;
  int host = 0;
  fails_receives = true;
  Status found;
  for (int attempt = 0; attempt < 5000 && found.ok(); ++attempt) {
    ends.other.progress();
    ends.one.progress();
    found = failure_of(
        [&] { require(!ends.one.try_receive_message(&message, &host), "a failed message was taken for a message"); });
    ends.one.sleep(1000, -1);
  }
  fails_receives = false;
  require_failure(found, Code::kPeerFailed, "UCX connection to the second failed: ");
}

void failed_flush_is_not_sent() {
  Ends ends;
  ends.connect();
  fails_flushes = true;
  require(!ends.one.all_sent(), "a failed flush was taken for sent");
  fails_flushes = false;
  const Status found = failure_of([&] { ends.one.progress(); });
  require_failure(found, Code::kFailed, "UCX failed to flush the worker: ");
}

// The other host's handshake arrives when nothing waits for it any more.
void failed_connect_leaves_nothing_in_flight() {
  Ends ends;
  fails_requests = true;
  const Status found = failure_of([&] { ends.connect(ends.one, 0); });
  fails_requests = false;
  require_failure(found, Code::kPeerFailed, "UCX connection to the second failed: ");
  std::thread second([&] {
    const Status ignored = failure_of(
        [&] { ends.other.connect(1, {ends.one.address(), ends.other.address()}, {"the first", "the second"}, 7, 1); });
  });
  const int64_t end = microseconds_now() + 500'000;
  while (microseconds_now() < end) ends.one.progress();
  second.join();
}

void invalid_setting_is_an_error() {
  const Status found = failure_of([&] { ucx::UcxLink link(*real, "NET_DEVICES=lo\nTLS=tcp\nTM_THRESH=no number", 2); });
  require_failure(found, Code::kFailed, "UCX failed to set TM_THRESH=no number: ");
}

}  // namespace

int main(int, char** arguments) {
  real = &ucx::load(arguments[1]);
  failed_receive_reports_failed_peer();
  failed_flush_is_not_sent();
  failed_connect_leaves_nothing_in_flight();
  invalid_setting_is_an_error();
  std::printf("ok\n");
  return 0;
}
