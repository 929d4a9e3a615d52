// A fake accelerator: PrivateUse1 with storages of its own, which only its own kernels read.
//
// A kernel runs that of the CPU on tensors that alias the device's memory, so that results are bit
// for bit those of a CPU. What a host program could do wrong with a device is refused or counted:
// tensors of two devices in one call, copies in either direction, and waiting for the device.
//
// A copy that nobody waits for (non_blocking) has the device's order, but is as late as it may be:
// what it brings to the host shows only at a later wait, and the host must leave alone what it
// reads until then; where it does not, the copy counts as torn.
//
// Its graphs (`torch.accelerator.Graph`) are as strict as CUDA's: recording leaves memory as it was,
// a replay knows addresses only, and memory that was freed while recording serves later recordings
// of the same pool.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#if __has_include(<ATen/core/GraphImplInterface.h>)  // torch 2.12
#include <ATen/core/GraphImplInterface.h>
#define HAS_GRAPHS
#endif

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

struct Counts {
  std::atomic<int64_t> copies_in{0}, copies_out{0}, waits{0}, kernels{0}, torn{0};
} counts;

// Two of them, of which one is current in a thread; each does its work in its own order.
constexpr c10::DeviceIndex kDevices = 2;
thread_local c10::DeviceIndex current = 0;

c10::DeviceIndex index_of(c10::Device device) { return device.has_index() ? device.index() : current; }

// Copies that nobody has waited for, oldest first, and how many there ever were.
struct LateCopy {
  c10::Storage host;  // kept alive
  char* place;
  std::vector<char> bytes;
  bool is_out;
};
struct Queue {
  std::deque<LateCopy> late;
  int64_t sent = 0;
  int64_t done() const { return sent - static_cast<int64_t>(late.size()); }
} queues[kDevices];
std::mutex late_mutex;

// Waits for the first copies of a device, so many of all that ever were.
void arrive(Queue& queue, int64_t until) {
  std::lock_guard lock(late_mutex);
  for (; !queue.late.empty() && queue.done() < until; queue.late.pop_front()) {
    auto& copy = queue.late.front();
    if (copy.is_out) {
      std::memcpy(copy.place, copy.bytes.data(), copy.bytes.size());
    } else if (std::memcmp(copy.place, copy.bytes.data(), copy.bytes.size())) {
      ++counts.torn;
    }
  }
}

void arrive_all() {
  for (auto& queue : queues) arrive(queue, queue.sent);
}

void copy_late(const at::Tensor& host, const at::Tensor& device, Queue& queue, bool is_out) {
  std::lock_guard lock(late_mutex);
  auto* place = static_cast<char*>(const_cast<void*>(host.const_data_ptr()));
  auto* bytes = static_cast<const char*>(is_out ? device.const_data_ptr() : place);
  queue.late.push_back({host.storage(), place, {bytes, bytes + host.nbytes()}, is_out});
  ++queue.sent;
  if (is_out) std::memset(place, 0x7f, host.nbytes());
}

// Memory of recordings. What was freed is there for the next one that shares the pool, as long as
// anything uses the pool.
struct Pool {
  std::map<size_t, std::vector<void*>> free;
  std::vector<void*> all;
  c10::MempoolId_t id;
  explicit Pool(c10::MempoolId_t id) : id(id) {}
  ~Pool() {
    for (auto* memory : all) std::free(memory);
  }
  void* take(size_t size) {
    auto& known = free[size];
    if (known.empty()) {
      all.push_back(std::aligned_alloc(64, size));
      return all.back();
    }
    auto* memory = known.back();
    known.pop_back();
    return memory;
  }
};

// One allocation: its own memory, or that of a pool.
struct Block {
  void* memory;
  size_t size;
  std::shared_ptr<Pool> pool;
};

struct Recorded;
thread_local Recorded* recording = nullptr;
const std::shared_ptr<Pool>& pool_of(Recorded*);
std::atomic<int64_t> bytes_allocated{0};

void refuse_while_recording(const std::string& what) {
  TORCH_CHECK(!recording, "fake_device: ", what, " is not permitted while a graph is recorded");
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  bytes_allocated -= block->size;
  if (block->pool) {
    block->pool->free[block->size].push_back(block->memory);
  } else {
    std::free(block->memory);
  }
  delete block;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, nullptr, &free_block, c10::Device(kDevice, current)};
    const auto size = (bytes + 63) / 64 * 64;
    auto pool = recording ? pool_of(recording) : nullptr;
    auto* memory = pool ? pool->take(size) : std::aligned_alloc(64, size);
    bytes_allocated += size;
    return {memory, new Block{memory, size, pool}, &free_block, c10::Device(kDevice, current)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
} allocator;
REGISTER_ALLOCATOR(kDevice, &allocator);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<kDevice> {
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Device getDevice() const override { return {kDevice, current}; }
  void setDevice(c10::Device device) const override { current = index_of(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = index_of(device); }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kDevice, std::exchange(current, index_of(device))};
  }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kDevice, index_of(device)));
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  void synchronizeDevice(c10::DeviceIndex device) const override { wait({kDevice, device}); }
  void synchronizeStream(const c10::Stream& stream) const override { wait(stream.device()); }

  // To wait for what was recorded after a late copy from the device is part of that copy.
  struct Event {
    c10::DeviceIndex device = 0;
    int64_t sent = 0;
    bool is_of_copy = false;
  };
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    std::lock_guard lock(late_mutex);
    const auto device = index_of(stream.device());
    auto& queue = queues[device];
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = {device, queue.sent, !queue.late.empty() && queue.late.back().is_out};
  }
  void block(void*, const c10::Stream&) const override {}  // one device does all in its order
  bool queryEvent(void* event) const override {
    std::lock_guard lock(late_mutex);
    const auto& known = *static_cast<Event*>(event);
    return queues[known.device].done() >= known.sent;
  }
  void synchronizeEvent(void* event) const override {
    const auto& known = *static_cast<Event*>(event);
    arrive(queues[known.device], known.sent);
    if (!known.is_of_copy) ++counts.waits;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }

 private:
  static void wait(c10::Device device) {
    refuse_while_recording("to wait for it");
    ++counts.waits;
    auto& queue = queues[index_of(device)];
    arrive(queue, queue.sent);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  // Its "pinned" memory is that of any CPU tensor.
  bool isPinnedPtr(const void*) const override { return false; }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return c10::GetAllocator(c10::DeviceType::CPU);
  }
};

bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDevice;
}

// A tensor of the CPU over the memory of one of ours, which has to outlive it.
at::Tensor over_memory(const at::Tensor& ours, c10::Storage storage = {}) {
  if (!storage) {
    storage = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), ours.storage().nbytes(),
        c10::DataPtr(const_cast<void*>(ours.storage().data()), c10::Device(c10::kCPU)),
        c10::GetAllocator(c10::kCPU), true));
  }
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), ours.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(
      ours.sizes(), ours.strides(), ours.storage_offset());
  return alias;
}

// What a graph has recorded: calls of kernels on addresses.
struct Recorded {
  struct Call {
    c10::OperatorHandle op;
    torch::jit::Stack arguments;
    std::vector<at::Tensor> results;  // where they lie, if the call did not get that memory
  };
  std::shared_ptr<Pool> pool;
  std::vector<Call> calls;
  std::map<char*, std::vector<char>> before;  // memory that the recording must leave as it was

  void will_touch(const at::Tensor& ours) {
    auto* memory = static_cast<char*>(const_cast<void*>(ours.storage().data()));
    if (memory) before.try_emplace(memory, memory, memory + ours.storage().nbytes());
  }
  void restore() {
    for (auto& [memory, bytes] : before) std::memcpy(memory, bytes.data(), bytes.size());
    before.clear();
  }
  void replay() const {
    for (auto& call : calls) {
      ++counts.kernels;
      auto stack = call.arguments;
      call.op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
      size_t at = 0;
      const auto keep = [&](const at::Tensor& made) {
        const auto& place = call.results.at(at++);
        if (place.defined() && place.numel()) place.copy_(made);
      };
      for (auto& value : stack) {
        if (value.isTensor()) keep(value.toTensor());
        if (value.isTensorList())
          for (const at::Tensor& each : value.toTensorVector()) keep(each);
      }
    }
  }
};

const std::shared_ptr<Pool>& pool_of(Recorded* recorded) { return recorded->pool; }

// Tensors of the CPU over the memory of ours, for one call.
class Aliases {
 public:
  // The device of the call: that of its tensors, or the one it names.
  void on(c10::Device device) {
    TORCH_CHECK(device_ < 0 || device_ == index_of(device),
                "fake_device: expected all tensors on one device, got fake_device:", int(device_),
                " and ", device);
    device_ = index_of(device);
  }

  at::Tensor of(const at::Tensor& ours) {
    on(ours.device());
    auto* key = ours.storage().unsafeGetStorageImpl();
    c10::Storage storage;
    for (auto& [device, host] : pairs_)
      if (device.unsafeGetStorageImpl() == key) storage = host;
    auto alias = over_memory(ours, storage);
    if (!storage) pairs_.emplace_back(ours.storage(), alias.storage());
    made_.emplace_back(ours, alias);
    return alias;
  }

  // What the CPU gave back: one of the arguments, a view of one, or memory that becomes ours.
  at::Tensor back(const at::Tensor& host) {
    if (!host.defined()) return host;
    for (auto& [ours, alias] : made_)
      if (alias.unsafeGetTensorImpl() == host.unsafeGetTensorImpl()) {
        if (host.storage().data() != ours.storage().data()) take(ours.storage(), host.storage());
        ours.unsafeGetTensorImpl()->set_sizes_and_strides(
            host.sizes(), host.strides(), host.storage_offset());
        return ours;
      }
    for (auto& [device, alias] : pairs_)
      if (alias.unsafeGetStorageImpl() == host.storage().unsafeGetStorageImpl())
        return over(device, host);
    auto storage = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), 0, c10::DataPtr(), &allocator, true));
    take(storage, host.storage());
    return over(storage, host);
  }

 private:
  // Memory that the CPU has allocated becomes that of the device.
  void take(const c10::Storage& ours, const c10::Storage& host) {
    if (recording) {  // which memory of its pool serves
      auto memory = allocator.allocate(host.nbytes());
      if (host.nbytes()) std::memcpy(memory.get(), host.data(), host.nbytes());
      ours.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
      ours.unsafeGetStorageImpl()->set_nbytes(host.nbytes());
      return;
    }
    auto* owner = new c10::Storage(host);
    bytes_allocated += host.nbytes();
    const auto free = [](void* context) {
      auto* held = static_cast<c10::Storage*>(context);
      bytes_allocated -= held->nbytes();
      delete held;
    };
    void* memory = const_cast<void*>(host.data());
    ours.unsafeGetStorageImpl()->set_data_ptr_noswap(
        c10::DataPtr(memory, owner, free, c10::Device(kDevice, device_ < 0 ? current : device_)));
    ours.unsafeGetStorageImpl()->set_nbytes(host.nbytes());
  }

  static at::Tensor over(const c10::Storage& storage, const at::Tensor& like) {
    auto ours = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), like.dtype());
    ours.unsafeGetTensorImpl()->set_sizes_and_strides(
        like.sizes(), like.strides(), like.storage_offset());
    return ours;
  }

  c10::DeviceIndex device_ = -1;
  std::vector<std::pair<c10::Storage, c10::Storage>> pairs_;
  std::vector<std::pair<at::Tensor, at::Tensor>> made_;
};

// Operators whose results have a size, or whose host code has a branch, that only the data decides.
bool waits_for_data(const std::string& name, const c10::ArrayRef<c10::IValue>& arguments) {
  static const std::vector<std::string> names = {
      "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
      "aten::unique_consecutive", "aten::equal", "aten::is_nonzero", "aten::bincount"};
  for (auto& each : names)
    if (name == each) return true;
  if (name == "aten::repeat_interleave") return arguments.back().isNone();
  if (name != "aten::index" && name != "aten::_index_put_impl_" && name != "aten::index_put_")
    return false;
  for (auto& each : arguments[1].toListRef())
    if (each.isTensor() && each.toTensor().defined() &&
        (each.toTensor().scalar_type() == at::kBool || each.toTensor().scalar_type() == at::kByte))
      return true;
  return false;
}

void run_on_device(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  const auto begin = stack->size() - count;
  ++counts.kernels;
  if (waits_for_data(schema.name(), torch::jit::last(*stack, count))) {
    refuse_while_recording(schema.name());
    ++counts.waits;
  }
  Aliases aliases;
  auto taken = [&](const at::Tensor& tensor) {
    if (is_ours(tensor) && recording) recording->will_touch(tensor);
    if (is_ours(tensor)) return aliases.of(tensor);
    TORCH_CHECK(
        !tensor.defined() || tensor.dim() == 0, "fake_device: expected all tensors on one device, got ",
        schema.name(), " with one of shape ", tensor.sizes(), " on ", tensor.device());
    return tensor;
  };
  for (size_t n = 0; n < count; ++n) {
    c10::IValue& value = (*stack)[begin + n];
    if (value.isTensor()) {
      value = taken(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> all;
      for (const at::Tensor& each : value.toTensorVector()) all.push_back(taken(each));
      value = c10::List<at::Tensor>(all);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> all;
      for (const std::optional<at::Tensor>& each : value.toOptionalTensorList())
        all.push_back(each && each->defined() ? std::optional(taken(*each)) : std::nullopt);
      value = all;
    } else if (value.isDevice() && value.toDevice().type() == kDevice) {
      aliases.on(value.toDevice());
      value = c10::Device(c10::kCPU);
    }
  }
  // Other accelerators have it for integers, so models take it there.
  const bool counts_integers = schema.name() == "aten::histc" && !(*stack)[begin].toTensor().is_floating_point();
  if (counts_integers) (*stack)[begin] = (*stack)[begin].toTensor().to(at::kDouble);
  Recorded::Call call{op, {}, {}};
  if (recording) call.arguments.assign(stack->begin() + begin, stack->end());
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  if (counts_integers) stack->back() = stack->back().toTensor().to(at::kInt);
  const auto results = schema.returns().size();
  const auto back = [&](const at::Tensor& host) {
    const auto ours = aliases.back(host);
    if (recording) {
      const bool is_there = !ours.defined() || ours.storage().data() == host.storage().data();
      call.results.push_back(is_there ? at::Tensor() : over_memory(ours));
    }
    return ours;
  };
  for (auto at = stack->size() - results; at < stack->size(); ++at) {
    c10::IValue& value = (*stack)[at];
    if (value.isTensor()) {
      value = back(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> all;
      for (const at::Tensor& each : value.toTensorVector()) all.push_back(back(each));
      value = c10::List<at::Tensor>(all);
    }
  }
  if (recording) recording->calls.push_back(std::move(call));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                 std::optional<c10::Layout>, std::optional<c10::Device> device,
                 std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                         std::optional<c10::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  if (recording) {
    if (!is_ours(self) || !is_ours(to)) refuse_while_recording("a copy from or to the host");
    recording->will_touch(to);
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
    recording->calls.push_back(
        {op, {over_memory(to), over_memory(self), non_blocking}, {at::Tensor()}});
  }
  Aliases aliases;
  if (!is_ours(self)) ++counts.copies_in;
  if (!is_ours(to)) ++counts.copies_out;
  const bool is_plain = self.is_contiguous() && to.is_contiguous() &&
                        self.dtype() == to.dtype() && self.sizes() == to.sizes();
  const bool is_late = non_blocking && is_plain && is_ours(self) != is_ours(to);
  if (!is_late && is_ours(self) != is_ours(to)) arrive_all();
  auto from = is_ours(self) ? aliases.of(self) : self;
  auto into = is_ours(to) ? aliases.of(to) : to;
  if (!is_late || is_ours(to)) into.copy_(from);
  if (is_late) {
    auto& queue = queues[(is_ours(self) ? self : to).device().index()];
    copy_late(is_ours(to) ? from : into, is_ours(to) ? into : from, queue, is_ours(self));
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

c10::Scalar item(const at::Tensor& self) {
  refuse_while_recording("to read a number from it");
  ++counts.waits;
  arrive_all();
  Aliases aliases;
  return aliases.of(self).item();
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size,
                         std::optional<c10::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage storage, int64_t offset,
                        c10::IntArrayRef size, c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

#ifdef HAS_GRAPHS
struct Graph final : at::GraphImplInterface {
  explicit Graph(const at::GraphImplArgs&) {}
  ~Graph() override {
    if (recording == &recorded_) recording = nullptr;
  }
  void capture_begin(c10::MempoolId_t pool, at::GraphCaptureMode) override {
    static std::map<c10::MempoolId_t, std::weak_ptr<Pool>> pools;
    static c10::CaptureId_t made = 0;
    refuse_while_recording("to record another");
    TORCH_CHECK(!recorded_.pool, "fake_device: the graph has recorded already: reset it");
    if (pool == c10::MempoolId_t{0, 0}) pool = {0, ++made};
    auto known = pools[pool].lock();
    recorded_.pool = known ? known : std::make_shared<Pool>(pool);
    pools[pool] = recorded_.pool;
    recording = &recorded_;
  }
  void capture_end() override {
    TORCH_CHECK(recording == &recorded_, "fake_device: no recording has begun");
    recording = nullptr;
    recorded_.restore();
  }
  void instantiate() override {}
  void replay() override {
    refuse_while_recording("a replay");
    TORCH_CHECK(recorded_.pool, "fake_device: the graph has recorded nothing");
    recorded_.replay();
  }
  void reset() override { recorded_ = {}; }
  c10::MempoolId_t pool() const override {
    TORCH_CHECK(recorded_.pool, "fake_device: the graph has recorded nothing");
    return recorded_.pool->id;
  }
  void enable_debug_mode() override {}
  void debug_dump(const std::string&) override {}

 private:
  Recorded recorded_;
};
#endif

}  // namespace

#ifdef HAS_GRAPHS
namespace at {  // where the registry's macro finds its names
REGISTER_GRAPH_IMPL(FAKE_DEVICE, ::Graph)
}
#endif

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_device>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
}

TORCH_LIBRARY(fake_device, m) {
  // An op of others runs on the device as what it is on the CPU.
  m.def("serve(str name, str overload) -> ()", [](std::string name, std::string overload) {
    static std::vector<c10::RegistrationHandleRAII> held;
    held.push_back(c10::Dispatcher::singleton().registerImpl(
        {name, overload}, c10::DispatchKey::PrivateUse1,
        c10::KernelFunction::makeFromBoxedFunction<&run_on_device>(), std::nullopt, nullptr, ""));
  });
  m.def("counts() -> int[]", []() {
    return std::vector<int64_t>{
        counts.copies_in, counts.copies_out, counts.waits, counts.kernels, counts.torn};
  });
  m.def("allocated() -> int", []() { return bytes_allocated.load(); });
  m.def("open() -> ()", []() {
    static Hooks hooks;
    if (!at::isPrivateUse1HooksRegistered()) at::RegisterPrivateUse1HooksInterface(&hooks);
  });
}
