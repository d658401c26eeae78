// The CPU executor: runs a kernel threadgroup by threadgroup, its lanes as fibers in lock step.
//
// The lanes of a simdgroup run, one after the other, up to where they must meet (a simd operation,
// a barrier, the end); then the meeting is judged and takes place. Buffers are copied so that they
// end at an inaccessible page. Kernels built with -fsanitize=thread and some of -fsanitize=undefined
// call the functions at the end of this file instead of those libraries: with `check`, every load
// and store is judged. This file itself is never instrumented.
#include <dlfcn.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))
#define CALLER ((char*)__builtin_return_address(0) - 1)
typedef uint32_t u32;
typedef uint64_t u64;

struct alignas(16) U3 { u32 x, y, z, pad; };
struct Builtins {  // as msl::Builtins of cpu.h
  U3 thread_position_in_grid, thread_position_in_threadgroup, threadgroup_position_in_grid,
      threads_per_threadgroup, threadgroups_per_grid, threads_per_grid;
  u32 thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup,
      simdgroups_per_threadgroup;
};
struct Buffer { char* data; u64 size; u32 writable, pad; };  // as in bench.py; 2: in parts
typedef void (*Entry)(void** buffers, const Builtins*);

// The last write and read of a byte: by which threadgroup and lane, after how many barriers.
struct Stamp { u32 group, barriers, simd_barriers; uint16_t lane; bool set, many; };
struct Shadow { Stamp write, read; };
struct Region { char* data; u64 size; std::string name; bool writable, device; std::vector<Shadow> shadow; };
struct Lane {
  jmp_buf here;
  ucontext_t start;
  char* stack;
  u32 id;
  bool started;
  const char *what, *file;  // where it waits; what == END: it has returned
  int line;
  u32 flags;
  alignas(16) char in[16];
  Builtins at;
};
struct Job {
  Entry entry;
  std::vector<Region> buffers;
  std::vector<void*> pointers;
  u32 groups[3], threads[3];
  bool check;
  u64 total;
  std::atomic<u64> next;
};
struct Worker {
  Job* job;
  std::vector<Lane> lanes;
  std::vector<Region> variables;
  std::map<u32, u32> variable;
  Lane* lane = nullptr;
  jmp_buf main;
  sigjmp_buf fault;
  u32 group, barriers[2] = {1, 1}, simd_barriers[2][32] = {};  // [0]: threadgroup memory, [1]: device
  char all[32][16];
};
static thread_local Worker* worker;
static const u64 PAGE = 16 << 10, STACK = 256 << 10, LIMIT = 32 << 10, GAP = 64;
static const char *END = "end of the kernel", *BARRIER = "threadgroup_barrier", *SIMD = "simdgroup_barrier";
static const char* module_base;

// ---- reports: each finding once, with how often it occurred; @pc becomes file:line in bench.py
static std::mutex mutex;
static std::map<std::string, u64> findings;
static std::atomic<bool> found;
static void report(const char* format, ...) __attribute__((format(printf, 1, 2)));
static void report(const char* format, ...) {
  char text[512];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  std::lock_guard<std::mutex> lock(mutex);
  findings[text]++;
  found = true;
}
static std::string place(const void* pc) {
  char text[40];
  snprintf(text, sizeof text, "@%lx", (long)((const char*)pc - module_base));
  return text;
}

// ---- fibers: ucontext makes one, setjmp switches
static void leave() {  // to the scheduler
  Worker* w = worker;
  if (!_setjmp(w->lane->here)) _longjmp(w->main, 1);
}
[[noreturn]] static void abandon() { siglongjmp(worker->fault, 1); }
static void fiber() {
  for (;;) {
    Worker* w = worker;
    Builtins at = w->lane->at;  // on the lane's own stack, which no check looks at
    void* pointers[64];
    memcpy(pointers, w->job->pointers.data(), sizeof(void*) * w->job->pointers.size());
    w->job->entry(pointers, &at);
    worker->lane->what = END;
    leave();
  }
}
static void run(Worker* w, Lane& lane) {
  w->lane = &lane;
  if (!_setjmp(w->main)) {
    if (lane.started) _longjmp(lane.here, 1);
    lane.started = true;
    getcontext(&lane.start);
    lane.start.uc_stack.ss_sp = lane.stack;
    lane.start.uc_stack.ss_size = STACK;
    makecontext(&lane.start, fiber, 0);
    setcontext(&lane.start);
  }
  w->lane = nullptr;
}
static void wait(const char* what, u32 flags, const char* file, int line) {
  Lane* l = worker->lane;
  l->what = what, l->flags = flags, l->file = file, l->line = line;
  leave();
}
extern "C" void msl_exchange(const void* in, void* all, unsigned size, const char* what, const char* file, int line) {
  memcpy(worker->lane->in, in, size);
  wait(what, 0, file, line);
  for (int i = 0; i < 32; i++) memcpy((char*)all + i * size, worker->all[i], size);
}
extern "C" void msl_barrier(unsigned flags, bool whole, const char* file, int line) {
  wait(whole ? BARRIER : SIMD, flags, file, line);
}
extern "C" unsigned msl_lane() { return worker->lane->id & 31; }
extern "C" void msl_fault(const char* what, long value, const char* file, int line) {
  report("%s (%ld) at %s:%d", what, value, file, line);
}

// ---- one threadgroup
static bool together(const Lane& a, const Lane& b) {
  return !strcmp(a.what, b.what) && (a.what == END || (a.line == b.line && !strcmp(a.file, b.file)));
}
[[noreturn]] static void diverged(const Lane& a, const Lane& b) {
  auto where = [](const Lane& l) {
    return l.what == END ? std::string(END) : std::string(l.what) + " at " + l.file + ":" + std::to_string(l.line);
  };
  report("DIVERGENT: thread %u in %s, thread %u in %s", a.id, where(a).c_str(), b.id, where(b).c_str());
  abandon();
}
static void run_simdgroup(Worker* w, u32 g) {  // up to a threadgroup barrier or the end
  Lane* lanes = &w->lanes[32 * g];
  do {
    for (int i = 0; i < 32; i++) run(w, lanes[i]);
    for (int i = 1; i < 32; i++)
      if (!together(lanes[0], lanes[i])) diverged(lanes[0], lanes[i]);
    for (int i = 0; i < 32; i++) memcpy(w->all[i], lanes[i].in, 16);
    if (lanes->what == SIMD)
      for (int k = 0; k < 2; k++) w->simd_barriers[k][g] += (lanes->flags >> !k) & 1;
  } while (lanes->what != END && lanes->what != BARRIER);
}
static void run_group(Worker* w, u64 n) {
  Job& j = *w->job;
  U3 position = {(u32)(n % j.groups[0]), (u32)(n / j.groups[0] % j.groups[1]), (u32)(n / j.groups[0] / j.groups[1]), 0};
  w->group = n + 1;
  for (u32 i = 0; i < w->lanes.size(); i++) {
    u32 x = i % j.threads[0], y = i / j.threads[0] % j.threads[1], z = i / j.threads[0] / j.threads[1];
    Builtins& at = w->lanes[i].at;
    at.thread_position_in_threadgroup = {x, y, z, 0};
    at.threadgroup_position_in_grid = position;
    at.thread_position_in_grid = {position.x * j.threads[0] + x, position.y * j.threads[1] + y,
                                  position.z * j.threads[2] + z, 0};
    at.threads_per_threadgroup = {j.threads[0], j.threads[1], j.threads[2], 0};
    at.threadgroups_per_grid = {j.groups[0], j.groups[1], j.groups[2], 0};
    at.threads_per_grid = {j.groups[0] * j.threads[0], j.groups[1] * j.threads[1], j.groups[2] * j.threads[2], 0};
    at.thread_index_in_threadgroup = i;
    at.thread_index_in_simdgroup = i % 32;
    at.simdgroup_index_in_threadgroup = i / 32;
    at.simdgroups_per_threadgroup = w->lanes.size() / 32;
  }
  for (auto& v : w->variables) {  // nothing is left over from another threadgroup
    memset(v.data, 0xff, v.size);
    std::fill(v.shadow.begin(), v.shadow.end(), Shadow{});
  }
  do {
    for (u32 g = 0; g < w->lanes.size() / 32; g++) run_simdgroup(w, g);
    for (auto& l : w->lanes)
      if (!together(w->lanes[0], l)) diverged(w->lanes[0], l);
    for (int k = 0; k < 2; k++) w->barriers[k] += (w->lanes[0].flags >> !k) & 1;
  } while (w->lanes[0].what != END);
}
extern "C" void* msl_threadgroup(unsigned id, const char* name, unsigned long size) {
  Worker* w = worker;
  if (!w->variable.count(id)) {
    u64 total = size;
    for (auto& v : w->variables) total += v.size;
    if (total > LIMIT) {
      report("THREADGROUP MEMORY: %lu bytes with %s, more than %lu", total, name, LIMIT);
      abandon();
    }
    w->variable[id] = w->variables.size();
    char* data = (char*)aligned_alloc(64, (size + 2 * GAP + 63) & ~63ul) + GAP;
    memset(data, 0xff, size);
    w->variables.push_back({data, size, name, true, false, std::vector<Shadow>(w->job->check ? size : 0)});
  }
  return w->variables[w->variable[id]].data;
}

// ---- one launch
static void on_fault(int, siginfo_t* info, void* context) {
  if (!worker || !worker->lane) {
    signal(SIGSEGV, SIG_DFL);
    return;
  }
  const char *at = (const char*)info->si_addr, *pc = nullptr;
#if defined(__linux__) && defined(__x86_64__)
  pc = (const char*)((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP];
#elif defined(__linux__) && defined(__aarch64__)
  pc = (const char*)((ucontext_t*)context)->uc_mcontext.pc;
#endif
  std::string what = "memory that is not mapped";
  for (auto& b : worker->job->buffers)
    if (at >= b.data - PAGE && at < b.data + b.size + PAGE)
      what = b.name + " of " + std::to_string(b.size) + " bytes at byte " + std::to_string(at - b.data);
  report("OUT OF BOUNDS: %s %s", what.c_str(), place(pc).c_str());
  abandon();
}
static void work(Job* job) {
  Worker w;
  w.job = job;
  w.lanes = std::vector<Lane>(job->threads[0] * job->threads[1] * job->threads[2]);
  u64 bytes = STACK * w.lanes.size(), alternate = 64 << 10;
  char* stacks = (char*)mmap(0, bytes + alternate, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  for (u32 i = 0; i < w.lanes.size(); i++) w.lanes[i].id = i, w.lanes[i].stack = stacks + STACK * i;
  stack_t signals = {}, before;
  signals.ss_sp = stacks + bytes, signals.ss_size = alternate;
  sigaltstack(&signals, &before);
  worker = &w;
  for (volatile u64 n; (n = job->next++) < job->total && !found;) {
    if (!sigsetjmp(w.fault, 1)) run_group(&w, n);
    else for (auto& l : w.lanes) l.started = false;
  }
  worker = nullptr;
  sigaltstack(&before, 0);
  munmap(stacks, bytes + alternate);
  for (auto& v : w.variables) free(v.data - GAP);
}
static Region guarded(const Buffer& b, int number) {  // a copy that ends at an inaccessible page
  u64 padded = (b.size + 15) & ~15ul, room = (padded + PAGE - 1) / PAGE * PAGE;
  char* base = (char*)mmap(0, room + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  mprotect(base + PAGE, room, PROT_READ | PROT_WRITE);
  char* data = base + PAGE + room - padded;
  memcpy(data, b.data, b.size);
  memset(data + b.size, 0xa5, padded - b.size);
  return {data, b.size, "buffer " + std::to_string(number), b.writable != 0, true, {}};
}
static void give_back(Region& r, const Buffer& b, bool check) {
  u64 padded = (r.size + 15) & ~15ul, room = (padded + PAGE - 1) / PAGE * PAGE;
  for (u64 i = r.size; i < padded; i++)
    if (r.data[i] != (char)0xa5) report("OUT OF BOUNDS: %s written at byte %lu of %lu", r.name.c_str(), i, r.size);
  for (u64 i = 0; check && b.writable == 1 && !found && i < r.size; i++)
    if (!r.shadow[i].write.set) report("NEVER WRITTEN: %s, first at byte %lu of %lu", r.name.c_str(), i, r.size);
  if (r.writable) memcpy(b.data, r.data, r.size);
  munmap(r.data + padded - room - PAGE, room + 2 * PAGE);
}
EXPORT int msl_dispatch(Entry entry, const Buffer* buffers, u32 n, const u32* groups, const u32* threads, u32 check) {
  Job job = {};
  job.entry = entry, job.check = check, job.total = 1;
  findings.clear(), found = false;
  Dl_info info;
  dladdr((void*)msl_dispatch, &info);
  module_base = (const char*)info.dli_fbase;
  for (int i = 0; i < 3; i++) job.groups[i] = groups[i], job.threads[i] = threads[i], job.total *= groups[i];
  for (u32 i = 0; i < n; i++) {
    job.buffers.push_back(guarded(buffers[i], i));
    job.pointers.push_back(job.buffers[i].data);
    if (check && buffers[i].writable) job.buffers[i].shadow.resize(buffers[i].size);
  }
  struct sigaction action = {}, segv, bus;
  action.sa_sigaction = on_fault, action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &action, &segv), sigaction(SIGBUS, &action, &bus);
  std::vector<std::thread> threads_;
  u64 count = check ? 1 : std::thread::hardware_concurrency();
  for (u64 i = 0; i < count && i < job.total; i++) threads_.emplace_back(work, &job);
  for (auto& t : threads_) t.join();
  sigaction(SIGSEGV, &segv, 0), sigaction(SIGBUS, &bus, 0);
  for (u32 i = 0; i < n; i++) give_back(job.buffers[i], buffers[i], check);
  return findings.size();
}
EXPORT const char* msl_findings() {
  static std::string text;
  text.clear();
  for (auto& f : findings) text += f.first + (f.second > 1 ? " [" + std::to_string(f.second) + " times]" : "") + "\n";
  return text.c_str();
}

// ---- check: every load and store
// Could another thread have touched this byte since the last barrier that orders the two?
static bool unordered(const Worker* w, const Stamp& s, bool device) {
  if (!s.set) return false;
  if (s.group != w->group) return device;
  if (s.barriers != w->barriers[device]) return false;
  u32 me = w->lane->id;
  if (s.many) return true;  // read by lanes of several simdgroups
  return s.lane != me && (s.lane / 32 != me / 32 || s.simd_barriers == w->simd_barriers[device][me / 32]);
}
static void stamp(const Worker* w, Stamp& s, bool device, bool reading) {
  u32 me = w->lane->id, g = w->group, b = w->barriers[device];
  bool again = reading && s.set && s.group == g && s.barriers == b;
  bool many = again && (s.many || s.lane / 32 != me / 32);
  s = {g, b, w->simd_barriers[device][me / 32], (uint16_t)me, true, many};
}
static void judge(Worker* w, Region& r, u64 offset, u64 n, bool write, const void* pc) {
  const char *name = r.name.c_str(), *doing = write ? "write" : "read";
  for (u64 i = offset; i < offset + n; i++) {
    Shadow& s = r.shadow[i];
    const char* other = unordered(w, s.write, r.device) ? "a write" : write && unordered(w, s.read, r.device) ? "a read" : 0;
    const char* far = s.write.set && s.write.group != w->group ? "threadgroup" : "thread";
    if (other) report("RACE: %s of %s and %s by another %s %s", doing, name, other, far, place(pc).c_str());
    if (!write && !s.write.set) report("UNINITIALISED: read of %s %s", name, place(pc).c_str());
    stamp(w, write ? s.write : s.read, r.device, !write);
    if (write) s.read = {};
    if (other) return;
  }
}
static bool inside(const Region& r, const char* p, u64 n) { return p >= r.data && p + n <= r.data + r.size; }
static bool in_module(const char* p) {  // constant tables
  static thread_local const char *low = nullptr, *high = nullptr;
  Dl_info info;
  if (low && p >= low && p < high) return true;
  if (!dladdr(p, &info) || info.dli_fbase != module_base) return false;
  low = low && low < p ? low : p, high = high > p ? high : p + 1;
  return true;
}
static void access(const void* address, u64 n, bool write, const char* pc) {
  Worker* w = worker;
  if (!w || !w->lane) return;
  const char* p = (const char*)address;
  if (p >= w->lane->stack && p < w->lane->stack + STACK) return;
  std::string near = "memory that no buffer is near";
  for (auto* regions : {&w->variables, &w->job->buffers})
    for (auto& r : *regions) {
      if (inside(r, p, n)) {
        if (write && !r.writable) report("WRITE to an input: %s %s", r.name.c_str(), place(pc).c_str());
        else if (r.writable) judge(w, r, p - r.data, n, write, pc);
        return;
      }
      if (p >= r.data - GAP && p < r.data + r.size + GAP)
        near = r.name + " of " + std::to_string(r.size) + " bytes at byte " + std::to_string(p - r.data);
    }
  if (in_module(p)) return;
  report("OUT OF BOUNDS: %s of %lu bytes, %s %s", write ? "write" : "read", n, near.c_str(), place(pc).c_str());
  abandon();
}
#define TSAN(N)                                                                                        \
  extern "C" void __tsan_read##N(void* p) { access(p, N, false, CALLER); }                             \
  extern "C" void __tsan_write##N(void* p) { access(p, N, true, CALLER); }                             \
  extern "C" void __tsan_unaligned_read##N(void* p) { access(p, N, false, CALLER); }                   \
  extern "C" void __tsan_unaligned_write##N(void* p) { access(p, N, true, CALLER); }                   \
  extern "C" void __tsan_read_write##N(void* p) { access(p, N, false, CALLER), access(p, N, true, CALLER); } \
  extern "C" void __tsan_unaligned_read_write##N(void* p) { access(p, N, false, CALLER), access(p, N, true, CALLER); }
TSAN(1) TSAN(2) TSAN(4) TSAN(8) TSAN(16)
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_read_range(void* p, u64 n) { access(p, n, false, CALLER); }
void __tsan_write_range(void* p, u64 n) { access(p, n, true, CALLER); }
void* __tsan_memcpy(void* to, const void* from, size_t n) {
  access(from, n, false, CALLER), access(to, n, true, CALLER);
  return memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, size_t n) {
  access(from, n, false, CALLER), access(to, n, true, CALLER);
  return memmove(to, from, n);
}
void* __tsan_memset(void* p, int value, size_t n) {
  access(p, n, true, CALLER);
  return memset(p, value, n);
}
// Handlers of the undefined-behaviour checks: their data begins with file, line, column.
struct Site { const char* file; u32 line, column; };
static void undefined(void* data, bool fatal, const char* what, long value = 0) {
  Site* s = (Site*)data;
  report("%s (%ld) at %s:%u", what, value, s->file ? s->file : "?", s->line);
  if (fatal && worker && worker->lane) abandon();
}
void __ubsan_handle_out_of_bounds(void* d, void* i) { undefined(d, true, "INDEX outside the array", (long)i); }
void __ubsan_handle_type_mismatch_v1(void* d, void* p) {
  undefined(d, !p, p ? "MISALIGNED access" : "NULL pointer", 1l << *((unsigned char*)d + 24));
}
void __ubsan_handle_shift_out_of_bounds(void* d, void*, void* by) { undefined(d, false, "SHIFT too far", (long)by); }
void __ubsan_handle_divrem_overflow(void* d, void*, void*) { undefined(d, true, "DIVISION by zero"); }
}
