// What threads of a team do and use; compiled and run by test_native_team.py, one line per fact.
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "team.h"

using namespace sluice;
using std::chrono::milliseconds;

// Allocations that still succeed; below 0: all.
std::atomic<int> allocations_left{-1};

void* allocate(size_t size, size_t alignment) {
  if (allocations_left.load() >= 0 && allocations_left.fetch_sub(1) <= 0) {
    allocations_left.store(0);
    throw std::bad_alloc();
  }
  return aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
}
void* operator new(size_t size) { return allocate(size, 16); }
void* operator new(size_t size, std::align_val_t alignment) { return allocate(size, static_cast<size_t>(alignment)); }
void operator delete(void* memory) noexcept { free(memory); }
void operator delete(void* memory, size_t) noexcept { free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { free(memory); }

double cpu_s(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Shares units, each of them a turn, until a helper has done some, or so often that one should have come.
bool meet(const Crew& crew, int most_shares = 1000) {
  std::atomic<bool> has_come{false};
  for (int i = 0; i < most_shares && !has_come.load(); i++)
    crew.share(8, kWakeWork, [&](int thread, int64_t) {
      if (thread != 0) has_come.store(true);
      std::this_thread::sleep_for(milliseconds(1));
    });
  return has_come.load();
}

// Whether every unit of works of many sizes is done once, by threads that exist, with neighbours behind each other.
bool does_each_once(int num_threads) {
  const Crew crew(num_threads);
  for (int64_t num_units = 0; num_units < 300; num_units++)
    for (const int64_t per_turn : {1, 2, 7, 400}) {
      std::vector<std::atomic<int>> times(num_units);
      std::atomic<int> num_strange{0};
      crew.share(num_units, kTurnWork / per_turn, [&](int thread, int64_t unit) {
        if (thread < 0 || thread >= num_threads) num_strange++;
        times[unit]++;
      });
      for (const auto& each : times)
        if (each.load() != 1 || num_strange.load() > 0) return false;
    }
  return true;
}

// CPU seconds of the caller while it waits for a helper whose turn takes `length`: as one that has lost its core. Its own
// turns take 20 us, or its only one as long.
double wait_cpu_s(const Crew& crew, milliseconds length, milliseconds own_length = milliseconds(0)) {
  std::atomic<bool> has_begun{false};
  double taken = 0.0;
  while (!has_begun.load()) {
    const double before = cpu_s(CLOCK_THREAD_CPUTIME_ID);
    crew.share(own_length.count() > 0 ? 2 : 8, kWakeWork, [&](int thread, int64_t) {
      if (thread == 0) {
        spins_until(std::chrono::microseconds(20), [] { return false; });
        std::this_thread::sleep_for(own_length);
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
  std::vector<int> by(16, -1);
  crew.share(16, kWakeWork, [&](int thread, int64_t unit) {
    by[unit] = thread;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  });
  return std::set<int>(by.begin(), by.end());
}

// Whether the caller does all of the work behind a turn for which it slept: at least once, since it may be late itself.
bool does_all_beside_who_was_late(const Crew& crew) {
  for (int i = 0; i < 10; i++) {
    wait_cpu_s(crew, milliseconds(100));
    if (who_works(crew) == std::set<int>{0}) return true;
  }
  return false;
}

// Whether a helper that computes for 3 ms while the caller sleeps does some of the next work: at least once, since it may
// have lost its core meanwhile.
bool comes_after_a_long_turn(const Crew& crew) {
  for (int i = 0; i < 200; i++) {
    std::atomic<bool> has_begun{false};
    crew.share(2, kWakeWork, [&](int thread, int64_t) {
      if (thread == 0) return std::this_thread::sleep_for(milliseconds(1));
      has_begun.store(true);
      spins_until(milliseconds(3), [] { return false; });
    });
    if (has_begun.load() && who_works(crew).size() == 2) return true;
  }
  return false;
}

// Times that threads went to sleep or waited.
long num_sleeps(const std::set<int>& threads) {
  long sum = 0;
  for (const int thread : threads) {
    std::ifstream status("/proc/self/task/" + std::to_string(thread) + "/status");
    for (std::string word; status >> word;)
      if (word == "voluntary_ctxt_switches:" && status >> word) sum += std::stol(word);
  }
  return sum;
}

// The system's ids of a team's helpers, but for the first ones.
std::set<int> ids_of_helpers(int num_threads, int first) {
  const Crew crew(num_threads);
  std::vector<std::atomic<int>> ids(num_threads);
  for (bool have_come = false; !have_come;) {
    crew.share(8 * num_threads, kWakeWork, [&](int thread, int64_t) {
      ids[thread].store(static_cast<int>(syscall(SYS_gettid)));
      std::this_thread::sleep_for(milliseconds(1));
    });
    have_come = true;
    for (const auto& id : ids) have_come = have_come && id.load() != 0;
  }
  std::this_thread::sleep_for(milliseconds(100));
  return std::set<int>(ids.begin() + first, ids.end());
}

// Times that helpers are woken by some parts of so much work for two threads, with a pause between them.
long num_wakes(const std::set<int>& helpers, int64_t unit_work) {
  const Crew crew(2);
  const long before = num_sleeps(helpers);
  for (int i = 0; i < 50; i++) {
    crew.share(2, unit_work, [](int, int64_t) { std::this_thread::sleep_for(milliseconds(1)); });
    std::this_thread::sleep_for(milliseconds(1));
  }
  return num_sleeps(helpers) - before;
}

// Whether work is done, and help comes later, although memory ends at any of the team's allocations.
bool outlives_want_of_memory() {
  for (int count = 0; count < 6; count++) {
    std::atomic<int> num_done{0};
    allocations_left.store(count);
    const Crew crew(2 + count);  // grows the team each time
    crew.share(2, kWakeWork, [&](int, int64_t) { num_done++; });
    allocations_left.store(-1);
    if (num_done.load() != 2 || !meet(Crew(2))) return false;
  }
  return true;
}

// Whether a child that is made while its parent has the helpers finds some.
bool child_has_helpers() {
  pid_t child = 0;
  Crew(2).share(2, kWakeWork, [&](int, int64_t unit) {
    if (unit == 0 && (child = fork()) == 0) _exit(meet(Crew(2), 100) ? 0 : 1);
  });
  int status = 1;
  waitpid(child, &status, 0);
  return status == 0;
}

// The worst niceness of the helpers that have come.
int nice_of_helpers(const Crew& crew) {
  std::atomic<int> worst{-100};
  while (worst.load() == -100)
    crew.share(64, kWakeWork, [&](int thread, int64_t) {
      if (thread != 0) worst.store(std::max(worst.load(), own_nice()));
      std::this_thread::sleep_for(milliseconds(1));
    });
  return worst.load();
}

// Lets a thread with less priority compute with so many threads; then says whether the next caller's helpers have it.
bool spoils_helpers(int num_threads) {
  std::thread([=] {
    setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), own_nice() + 1);
    meet(Crew(num_threads));
  }).join();
  return nice_of_helpers(Crew(num_threads)) > own_nice();
}

// Threads of a second caller's work, while the first one has the helpers or only could have them.
size_t threads_of_second(bool is_sharing) {
  const Crew first(2);
  size_t found = 0;
  const auto ask = [&] { std::thread([&] { found = meet(Crew(2), 100) ? 2 : who_works(Crew(2)).size(); }).join(); };
  if (!is_sharing) {
    ask();
  } else {
    first.share(2, kWakeWork, [&](int, int64_t unit) {
      if (unit == 0) ask();
    });
  }
  return found;
}

// Whether work is done that one shares in the middle of work that it has shared.
bool does_within() {
  const Crew crew(2);
  std::atomic<int> num_done{0};
  crew.share(4, kWakeWork, [&](int, int64_t) { crew.share(4, kWakeWork, [&](int, int64_t) { num_done++; }); });
  return num_done.load() == 16;
}

int main() {
  std::printf("outlives want of memory: %d\n", outlives_want_of_memory());
  std::printf("helpers keep the priority of a gentle start: %d\n", spoils_helpers(2));
  std::printf("or have it if it brought some more: %d\n", spoils_helpers(4));
  for (int num_threads = 1; num_threads <= 4; num_threads++)
    std::printf("each once by %d: %d\n", num_threads, does_each_once(num_threads));
  {
    const Crew crew(2);
    meet(crew);
    std::printf("cpu of a wait of 100 ms: %f\n", wait_cpu_s(crew, milliseconds(100)));
    std::printf("the caller does all beside a helper that was late: %d\n", does_all_beside_who_was_late(crew));
    std::printf("cpu of a wait behind a long turn: %f\n", wait_cpu_s(crew, milliseconds(500), milliseconds(100)));
    std::printf("a helper that was late comes again: %d\n", meet(crew, 200));
    std::printf("a helper comes after a long turn: %d\n", comes_after_a_long_turn(crew));
    meet(crew);
    const double before = cpu_s(CLOCK_PROCESS_CPUTIME_ID);
    std::this_thread::sleep_for(milliseconds(400));
    std::printf("cpu of 400 ms without work: %f\n", cpu_s(CLOCK_PROCESS_CPUTIME_ID) - before);
  }
  std::printf("threads beside a caller that waits: %zu\n", threads_of_second(false));
  std::printf("threads beside a caller that shares: %zu\n", threads_of_second(true));
  std::printf("does what is shared within: %d\n", does_within());
  std::printf("a child has helpers: %d\n", child_has_helpers());
  std::printf("wakes of helpers that are not wanted: %ld\n", num_wakes(ids_of_helpers(8, 2), kWakeWork));
  std::printf("wakes of a helper for large parts: %ld\n", num_wakes(ids_of_helpers(2, 1), kWakeWork));
  std::printf("wakes of a helper for small parts: %ld\n", num_wakes(ids_of_helpers(2, 1), kWakeWork / 4));
}
