// sample and spec_verify: schemas, argument checks, outputs.

#include "sampling.h"

#include "../cpu/parallel.h"
#include "../cpu/sampling.h"
#include "../cuda/sampling.h"
#include "check.h"
#include "rows.h"

namespace deepinfer {

namespace {

using OptionalTensor = std::optional<Tensor>;

// A contiguous argument of the given shape and dtype.
OptionalTensor argument(const char* op, const char* name, const OptionalTensor& t, const std::vector<int64_t>& sizes,
                        ScalarType dtype, const Tensor& like) {
  if (!t) return std::nullopt;
  check_same_device(op, name, *t, like);
  DI_CHECK(t->scalar_type() == dtype, op, ": ", name, " must be ", name_of(dtype), ", got ", name_of(t->scalar_type()));
  std::string expected = "[";
  for (size_t d = 0; d < sizes.size(); ++d) expected += (d ? ", " : "") + std::to_string(sizes[d]);
  DI_CHECK(sizes_of(*t) == sizes, op, ": ", name, " must have shape ", expected, "], got ", shape_of(*t));
  return torch::stable::contiguous(*t);
}

template <typename T>
const T* data_of(const OptionalTensor& t) {
  return t ? static_cast<const T*>(t->const_data_ptr()) : nullptr;
}

// The logits and what filters them, as the kernels read them.
class Source {
 public:
  Source(const char* op, const Tensor& logits, const OptionalTensor& temperature, const OptionalTensor& top_k,
         const OptionalTensor& top_p, const OptionalTensor& min_p)
      : logits_(logits) {
    constexpr int64_t kMost = int64_t(1) << 23;
    from.dtype = float_dtype(op, "logits", logits);
    from.size = logits.size(logits.dim() - 1);
    DI_CHECK(from.size >= 1 && from.size < kMost, op, ": the last dimension of logits must lie in [1, 2^23), got ",
             from.size);
    std::vector<int64_t> sizes = sizes_of(logits);
    sizes.pop_back();
    temperature_ = argument(op, "temperature", temperature, sizes, ScalarType::Float, logits);
    top_k_ = argument(op, "top_k", top_k, sizes, ScalarType::Int, logits);
    top_p_ = argument(op, "top_p", top_p, sizes, ScalarType::Float, logits);
    min_p_ = argument(op, "min_p", min_p, sizes, ScalarType::Float, logits);
    logits_ = with_dense_rows(logits);
    from.logits = logits_.const_data_ptr();
    from.rows = rows_of(op, logits_);
    from.temperature = data_of<float>(temperature_);
    from.top_k = data_of<int32_t>(top_k_);
    from.top_p = data_of<float>(top_p_);
    from.min_p = data_of<float>(min_p_);
  }

  Distributions from{};

 private:
  Tensor logits_;
  OptionalTensor temperature_, top_k_, top_p_, min_p_;
};

void run_sample(const SampleArgs& args, const Tensor& logits) {
  if (args.from.rows.count == 0) return;
  if (logits.is_cuda()) cuda::sample(args, logits.get_device_index());
  else cpu::parallel(cpu::sample, args, args.from.rows.count, args.from.size * 8);
}

std::tuple<Tensor, Tensor> sample(const Tensor& logits, const Tensor& seeds, const OptionalTensor& offsets,
                                  const OptionalTensor& temperature, const OptionalTensor& top_k,
                                  const OptionalTensor& top_p, const OptionalTensor& min_p, bool keep_ties,
                                  bool return_log_probs) {
  const char* op = "sample";
  DI_CHECK(logits.dim() >= 1, op, ": logits must have at least one dimension");
  const Source source(op, logits, temperature, top_k, top_p, min_p);
  std::vector<int64_t> sizes = sizes_of(logits);
  sizes.pop_back();
  const OptionalTensor dense_seeds = argument(op, "seeds", seeds, sizes, ScalarType::Long, logits);
  const OptionalTensor dense_offsets = argument(op, "offsets", offsets, sizes, ScalarType::Long, logits);
  Tensor ids = new_tensor(logits, sizes, ScalarType::Long);
  Tensor log_probs = new_tensor(logits, return_log_probs ? sizes : std::vector<int64_t>{0}, ScalarType::Float);
  SampleArgs args{};
  args.from = source.from;
  args.from.keep_ties = keep_ties;
  args.seeds = data_of<int64_t>(dense_seeds);
  args.offsets = data_of<int64_t>(dense_offsets);
  args.ids = static_cast<int64_t*>(ids.mutable_data_ptr());
  args.log_probs = return_log_probs ? static_cast<float*>(log_probs.mutable_data_ptr()) : nullptr;
  run_sample(args, logits);
  return {ids, log_probs};
}

// One set of filters for all rows.
Tensor sample_alike(const Tensor& logits, const Tensor& seeds, double temperature, int64_t top_k, double top_p,
                    bool keep_ties) {
  const char* op = "draw";
  DI_CHECK(logits.dim() >= 1, op, ": logits must have at least one dimension");
  const Source source(op, logits, {}, {}, {}, {});
  std::vector<int64_t> sizes = sizes_of(logits);
  sizes.pop_back();
  const OptionalTensor dense_seeds = argument(op, "seeds", seeds, sizes, ScalarType::Long, logits);
  Tensor ids = new_tensor(logits, sizes, ScalarType::Long);
  SampleArgs args{};
  args.from = source.from;
  args.from.all = {float(temperature), float(top_p), 0.f, top_k};
  args.from.keep_ties = keep_ties;
  args.seeds = data_of<int64_t>(dense_seeds);
  args.ids = static_cast<int64_t*>(ids.mutable_data_ptr());
  run_sample(args, logits);
  return ids;
}

std::tuple<Tensor, Tensor> spec_verify(const Tensor& target_logits, const Tensor& draft_ids,
                                       const OptionalTensor& draft_probs, const Tensor& seeds,
                                       const OptionalTensor& offsets, const OptionalTensor& num_drafted,
                                       const OptionalTensor& temperature, const OptionalTensor& top_k,
                                       const OptionalTensor& top_p, const OptionalTensor& min_p) {
  const char* op = "spec_verify";
  DI_CHECK(target_logits.dim() == 3 && target_logits.size(1) >= 1, op,
           ": target_logits must be 3-D, [batch, drafted + 1, vocabulary], got shape ", shape_of(target_logits));
  const Source source(op, target_logits, temperature, top_k, top_p, min_p);
  const int64_t batch = target_logits.size(0), positions = target_logits.size(1), drafted = positions - 1;
  const auto given = [&](const char* name, const OptionalTensor& t, std::vector<int64_t> sizes, ScalarType dtype) {
    return argument(op, name, t, sizes, dtype, target_logits);
  };
  const OptionalTensor ids = given("draft_ids", draft_ids, {batch, drafted}, ScalarType::Long);
  const OptionalTensor probs =
      given("draft_probs", draft_probs, {batch, drafted, source.from.size}, ScalarType::Float);
  const OptionalTensor dense_seeds = given("seeds", seeds, {batch}, ScalarType::Long);
  const OptionalTensor dense_offsets = given("offsets", offsets, {batch}, ScalarType::Long);
  const OptionalTensor counts = given("num_drafted", num_drafted, {batch}, ScalarType::Int);
  Tensor out = new_tensor(target_logits, {batch, positions}, ScalarType::Long);
  Tensor accepted = new_tensor(target_logits, {batch}, ScalarType::Int);
  SpecVerifyArgs args{};
  args.target = source.from;
  args.draft_ids = data_of<int64_t>(ids);
  args.draft_probs = data_of<float>(probs);
  args.num_drafted = data_of<int32_t>(counts);
  args.seeds = data_of<int64_t>(dense_seeds);
  args.offsets = data_of<int64_t>(dense_offsets);
  args.ids = static_cast<int64_t*>(out.mutable_data_ptr());
  args.accepted = static_cast<int32_t*>(accepted.mutable_data_ptr());
  args.drafted = drafted;
  if (batch == 0) return {out, accepted};
  if (!target_logits.is_cuda()) {
    cpu::parallel(cpu::spec_verify, args, batch, positions * args.target.size * 8);
    return {out, accepted};
  }
  Tensor choices = new_tensor(target_logits, {batch, positions}, ScalarType::Long);
  Tensor verdicts = new_tensor(target_logits, {batch, positions}, ScalarType::Int);
  args.choices = static_cast<int64_t*>(choices.mutable_data_ptr());
  args.verdicts = static_cast<int32_t*>(verdicts.mutable_data_ptr());
  cuda::spec_verify(args, target_logits.get_device_index());
  return {out, accepted};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(deepinfer, m) {
  m.def(
      "sample(Tensor logits, Tensor seeds, Tensor? offsets=None, *, Tensor? temperature=None, Tensor? top_k=None,"
      " Tensor? top_p=None, Tensor? min_p=None, bool keep_ties=False, bool return_log_probs=False)"
      " -> (Tensor, Tensor)");
  m.def(
      "_sample_alike(Tensor logits, Tensor seeds, float temperature, int top_k, float top_p, bool keep_ties)"
      " -> Tensor");
  m.def(
      "spec_verify(Tensor target_logits, Tensor draft_ids, Tensor? draft_probs, Tensor seeds, Tensor? offsets=None, *,"
      " Tensor? num_drafted=None, Tensor? temperature=None, Tensor? top_k=None, Tensor? top_p=None,"
      " Tensor? min_p=None) -> (Tensor, Tensor)");
}

static void implement(auto& m) {
  m.impl("sample", TORCH_BOX(&sample));
  m.impl("_sample_alike", TORCH_BOX(&sample_alike));
  m.impl("spec_verify", TORCH_BOX(&spec_verify));
}

STABLE_TORCH_LIBRARY_IMPL(deepinfer, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(deepinfer, CUDA, m) { implement(m); }

}  // namespace deepinfer
