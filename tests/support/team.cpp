// What threads of a team do and use; compiled and run by test_native_team.py, one line per fact.
#include <time.h>

#include <cstdio>
#include <set>
#include <vector>

#include "team.h"

using namespace sluice;
using std::chrono::milliseconds;

double cpu_s(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Shares units until a helper has done some, in turns that end when it has begun one.
void meet(const Crew& crew) {
  std::atomic<bool> has_come{false};
  while (!has_come.load())
    crew.share(8, 1, [&](int thread, int64_t) {
      if (thread != 0) has_come.store(true);
      std::this_thread::sleep_for(milliseconds(1));
    });
}

// Whether every unit of works of many sizes is done once, by threads that exist, with neighbours behind each other.
bool does_each_once(int num_threads) {
  const Crew crew(num_threads);
  for (int64_t num_units = 0; num_units < 300; num_units++)
    for (const int64_t per_turn : {1, 2, 7, 400}) {
      std::vector<std::atomic<int>> times(num_units);
      std::atomic<int> num_strange{0};
      crew.share(num_units, per_turn, [&](int thread, int64_t unit) {
        if (thread < 0 || thread >= num_threads) num_strange++;
        times[unit]++;
      });
      for (const auto& each : times)
        if (each.load() != 1 || num_strange.load() > 0) return false;
    }
  return true;
}

// CPU seconds of the caller while it waits for a helper whose turn takes `length`: as one that has lost its core. Its own
// turns take 20 us.
double wait_cpu_s(const Crew& crew, milliseconds length) {
  std::atomic<bool> has_begun{false};
  double taken = 0.0;
  while (!has_begun.load()) {
    const double before = cpu_s(CLOCK_THREAD_CPUTIME_ID);
    crew.share(8, 1, [&](int thread, int64_t) {
      if (thread == 0) {
        spins_until(std::chrono::microseconds(20), [] { return false; });
      } else if (!has_begun.exchange(true)) {
        std::this_thread::sleep_for(length);
      }
    });
    taken = cpu_s(CLOCK_THREAD_CPUTIME_ID) - before;
  }
  return taken;
}

// Threads that have done units of some work.
std::set<int> who_works(const Crew& crew) {
  std::vector<int> by(64, -1);
  crew.share(64, 1, [&](int thread, int64_t unit) {
    by[unit] = thread;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  });
  return std::set<int>(by.begin(), by.end());
}

int nice_of_this() { return getpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid))); }

// The worst niceness of the helpers that have come.
int nice_of_helpers(const Crew& crew) {
  std::atomic<int> worst{-100};
  while (worst.load() == -100)
    crew.share(64, 1, [&](int thread, int64_t) {
      if (thread != 0) worst.store(std::max(worst.load(), nice_of_this()));
      std::this_thread::sleep_for(milliseconds(1));
    });
  return worst.load();
}

// Lets a thread with less priority compute with so many threads; then says whether the next caller's helpers have it.
bool spoils_helpers(int num_threads) {
  std::thread([=] {
    setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), nice_of_this() + 1);
    meet(Crew(num_threads));
  }).join();
  return nice_of_helpers(Crew(num_threads)) > nice_of_this();
}

int main() {
  std::printf("helpers keep the priority of a gentle start: %d\n", spoils_helpers(2));
  std::printf("or have it if it brought some more: %d\n", spoils_helpers(4));
  for (int num_threads = 1; num_threads <= 4; num_threads++)
    std::printf("each once by %d: %d\n", num_threads, does_each_once(num_threads));
  {
    const Crew crew(2);
    meet(crew);
    std::printf("cpu of a wait of 100 ms: %f\n", wait_cpu_s(crew, milliseconds(100)));
    const std::set<int> who = who_works(crew);
    std::printf("the caller does all beside a helper that was late: %d\n", who == std::set<int>{0});
    meet(crew);
    const double before = cpu_s(CLOCK_PROCESS_CPUTIME_ID);
    std::this_thread::sleep_for(milliseconds(400));
    std::printf("cpu of 400 ms without work: %f\n", cpu_s(CLOCK_PROCESS_CPUTIME_ID) - before);
    std::thread([] {
      const Crew other(2);
      std::printf("threads of a second caller: %d\n", other.num_threads());
    }).join();
  }
}
