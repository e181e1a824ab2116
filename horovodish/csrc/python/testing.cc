// Parts of the engine without I/O, for its tests.
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>

#include "abi/mpi.h"
#include "arithmetic/codecs/codec.h"
#include "arithmetic/copy_bytes.h"
#include "arithmetic/instructions.h"
#include "arithmetic/reduce.h"
#include "engine/engine.h"
#include "engine/operation_table.h"
#include "memory/clock.h"
#include "memory/waiting_costs.h"
#include "negotiation/tree.h"
#include "planes/carried_values.h"
#include "planes/mpi/schedule.h"
#include "planes/shards.h"
#include "python/bindings.h"
#include "timeline/timeline_writer.h"
#include "xla/xla_call.h"

namespace nb = nanobind;

namespace horovodish {

// Lets engines without a thread take turns, and lets them die without a word, as a killed process does.
class EngineByTurns {
 public:
  static bool turn(Engine& engine) {
    const std::lock_guard hold(engine.seat_);
    return !engine.stopping_ && engine.turn();
  }
  static void die(Engine& engine) {
    const std::lock_guard hold(engine.seat_);
    {
      std::lock_guard lock(engine.inbox_mutex_);
      engine.closed_ = true;
      engine.doorbell_ = engine.own_doorbell_;
    }
    engine.stopping_ = true;
    engine.process_sets_.clear();
    engine.peer_deaths_.reset();
    engine.arena_.reset();
  }
  static void lose_peer(Engine& engine, size_t local_rank) {
    if (engine.peer_deaths_) engine.peer_deaths_->set_gone(local_rank);
  }
};

namespace {

// A clock that moves by a microsecond at each look, so that a loop with a limit ends.
struct ClockOfTests {
  static Clock::time_point now() { return Clock::time_point(++micros); }
  static void sleep(std::chrono::nanoseconds time) { micros += std::chrono::ceil<std::chrono::microseconds>(time); }
  static inline std::chrono::microseconds micros{0};
  static constexpr Clock::Source source{now, sleep};
};

// Sets the tests' clock to this many seconds; none: the engine uses the machine's clock again.
void set_clock(std::optional<double> seconds) {
  ClockOfTests::micros = std::chrono::microseconds(static_cast<int64_t>(seconds.value_or(0) * 1e6));
  Clock::replace(seconds ? &ClockOfTests::source : nullptr);
}

nb::bytes as_bytes(const std::string& message) { return nb::bytes(message.data(), message.size()); }

// Every decision has a type, a name, a text and the part of joined ranks. Other fields depend on the type.
nb::dict as_dict(const Decision& decision) {
  static constexpr const char* kTypes[] = {"execute", "fail", "join_done", "lost", "note"};
  nb::dict entry;
  entry["type"] = kTypes[decision.index()];
  entry["name"] = entry["text"] = "";
  entry["joined"] = 0;
  entry["submitted"] = false;
  entry["families"] = std::vector<std::string>{};
  if (const auto* decided = std::get_if<DecidedCollective>(&decision)) {
    std::vector<size_t> absent;
    for (size_t bit = 0; bit < decided->absent.size() * 8; ++bit) {
      if (mask_bit(decided->absent, bit)) absent.push_back(bit);
    }
    entry["name"] = decided->name;
    entry["number"] = decided->number;
    entry["joined"] = decided->joined_ranks;
    entry["absent"] = absent;
    entry["submitted"] = decided->submitted();
    entry["values"] = as_bytes(decided->values);
  } else if (const auto* failed = std::get_if<Fail>(&decision)) {
    entry["name"] = failed->name;
    entry["text"] = failed->text;
    entry["families"] = failed->families;
  } else if (const auto* joined = std::get_if<Joined>(&decision)) {
    entry["rank"] = number_of(joined->last_rank);
  } else if (const auto* lost = std::get_if<Lost>(&decision)) {
    entry["text"] = lost->text;
    entry["number"] = lost->finished;
  } else {
    entry["text"] = std::get<Note>(decision).text;
  }
  return entry;
}

// The negotiation without the engine, for tests that play the part of the network.
void bind_negotiation(nb::module_& module) {
  nb::class_<Negotiation>(module, "Negotiation")
      .def(nb::new_([](bool root, const std::vector<std::vector<int>>& participants, size_t cache_capacity) {
             std::vector<RankSet> sets;
             for (const auto& ranks : participants) {
               RankSet set;
               for (const int rank : ranks) set.add(RankSet(WorldRank(rank)));
               sets.push_back(std::move(set));
             }
             return std::make_unique<Negotiation>(root, std::move(sets), cache_capacity);
           }),
           nb::arg("root"), nb::arg("participants"), nb::arg("cache_capacity"))
      .def(
          "submit",
          [](Negotiation& self, const std::string& name, const std::vector<int64_t>& shape,
             const std::vector<size_t>& absent, size_t members, std::optional<int> broadcast_from,
             const std::string& family, const std::string& refusal, const nb::bytes& values) {
            Request request;
            request.name = name;
            if (broadcast_from) {
              request.kind = Kind::broadcast;
              request.root = WorldRank(*broadcast_from);
            }
            request.members.assign(members, {name, DType::float32, shape});
            request.family.name = family;
            request.refusal = refusal;
            self.submit(name, request.signature(), make_mask(absent, members), {values.c_str(), values.size()});
          },
          nb::arg("name"), nb::arg("shape"), nb::arg("absent") = std::vector<size_t>{}, nb::arg("members") = 1,
          nb::arg("broadcast_from") = std::nullopt, nb::arg("family") = "", nb::arg("refusal") = "",
          nb::arg("values") = nb::bytes(""))
      .def("join", &Negotiation::join)
      .def(
          "lost",
          [](Negotiation& self, bool failed, uint64_t finished, const std::string& text) {
            self.lost({failed ? Loss::failed : Loss::left, finished, text});
          },
          nb::arg("failed"), nb::arg("finished"), nb::arg("text"))
      .def(
          "parent_lost", [](Negotiation& self, const std::string& text) { self.parent_lost({Loss::failed, 0, text}); },
          nb::arg("text"))
      .def(
          "note_to_root", [](Negotiation& self, const std::string& text) { self.note_to_root({.text = text}); },
          nb::arg("text"))
      .def(
          "note_to_all", [](Negotiation& self, const std::string& text) { self.note_to_all({.text = text}); },
          nb::arg("text"))
      .def("set_now", &Negotiation::set_now, nb::arg("seconds"))
      .def("lateness", [](const Negotiation& self) { return lateness_table(self.lateness()); })
      .def("from_child", [](Negotiation& self, size_t child,
                            const nb::bytes& message) { self.from_child(child, {message.c_str(), message.size()}); })
      .def("from_parent",
           [](Negotiation& self, const nb::bytes& message) { self.from_parent({message.c_str(), message.size()}); })
      .def("take_for_parent", [](Negotiation& self) { return as_bytes(self.take_for_parent()); })
      .def("take_for_children", [](Negotiation& self) { return as_bytes(self.take_for_children()); })
      .def("take_decisions",
           [](Negotiation& self) {
             nb::list result;
             while (const auto decision = self.take_decision()) result.append(as_dict(*decision));
             return result;
           })
      .def("cached", &Negotiation::cached)
      .def("unacknowledged", &Negotiation::unacknowledged)
      .def("anything_pending", &Negotiation::anything_pending)
      .def("full_requests", &Negotiation::full_requests);
}

// An operation table without a process set. It records the calls to its owner.
class TableAlone final : private OperationTable::Owner {
 public:
  void submit(const std::string& name, const std::string& family, int64_t run, const std::string& refusal) {
    auto request = std::make_shared<Request>();
    request->name = name;
    request->family = {.name = family, .run = run};
    request->refusal = refusal;
    auto operation = std::make_shared<Operation>();
    operation->request = std::move(request);
    operation->handle = std::make_shared<Handle>(++submitted_);
    table_.submit(operation);
  }
  void begin(const std::string& name, uint64_t decision) {
    table_.begin(name, decision);
    table_.submit_next(name);
  }
  void fail(const std::string& name, const std::vector<std::string>& families) { table_.fail(name, "why", families); }
  void end(uint64_t decision) { table_.end(OperationTable::Pointer(table_.executing().at(decision)), nullptr); }
  void abandon() {
    const Error error{ErrorKind::rank_lost, "lost"};
    table_.abandon_undecided(error);
    table_.abandon_executing(error);
  }
  bool busy() const { return table_.busy(); }
  // The news since the last call: the name of a stated operation, or how the submission with this number ended.
  nb::list take_news() { return std::exchange(news_, nb::list()); }

 private:
  void state(const std::shared_ptr<Operation>& operation) override {
    news_.append(nb::make_tuple("stated", operation->request->name));
  }
  void settle(const std::shared_ptr<Operation>& operation, const Error* error) noexcept override {
    news_.append(nb::make_tuple(error == nullptr ? "done" : class_name(error->kind), operation->handle->id()));
  }
  void submit_again(const std::shared_ptr<Operation>& operation) noexcept override { table_.submit(operation); }

  uint64_t submitted_ = 0;
  nb::list news_;
  OperationTable table_{0, WorldRank(0), *this};
};

void bind_operation_table(nb::module_& module) {
  nb::class_<TableAlone>(module, "OperationTable")
      .def(nb::init<>())
      .def("submit", &TableAlone::submit, nb::arg("name"), nb::arg("family") = "", nb::arg("run") = 0,
           nb::arg("refusal") = "")
      .def("begin", &TableAlone::begin, nb::arg("name"), nb::arg("decision"))
      .def("fail", &TableAlone::fail, nb::arg("name"), nb::arg("families") = std::vector<std::string>{})
      .def("end", &TableAlone::end, nb::arg("decision"))
      .def("abandon", &TableAlone::abandon)
      .def("busy", &TableAlone::busy)
      .def("take_news", &TableAlone::take_news);
}

void bind_tree(nb::module_& module) {
  module.def(
      "tree_node",
      [](const std::vector<std::vector<int>>& hosts, int index) {
        const TreeNode node = tree_node(hosts, index);
        return nb::make_tuple(node.parent, node.children);
      },
      nb::arg("hosts"), nb::arg("index"));
  module.def("subtree", &subtree, nb::arg("hosts"), nb::arg("index"));
}

// The timeline without its thread.
void bind_timeline(nb::module_& module) {
  using Ring = SingleProducerRing<int>;
  using What = TimelineRecord::What;
  nb::class_<Ring>(module, "Ring")
      .def(nb::init<size_t>(), nb::arg("capacity"))
      .def(
          "push", [](Ring& self, int value) { return self.push(std::move(value)); }, nb::arg("value"))
      .def("take", &Ring::take);
  // Records: what happened (a value of TimelineRecord::What), on which track, from when to when, and a name if the
  // track is described before the record.
  using Records = std::vector<std::tuple<int, uint32_t, int64_t, int64_t, std::string>>;
  module.def(
      "write_timeline",
      [](int descriptor, const Records& records, uint64_t dropped) {
        TimelineWriter writer(descriptor, 0, "", 0);
        int64_t end = 0;
        for (const auto& [what, track, from, to, name] : records) {
          if (!name.empty()) {
            auto request = std::make_shared<Request>();
            request->name = name;
            request->members = {{name, DType::float32, {3}}};
            writer.describe(track, {name, request});
          }
          const bool phase = what == static_cast<int>(What::phase);
          writer.take(phase ? TimelineRecord(Phase::pack, track, from, to)
                            : TimelineRecord(static_cast<What>(what), track, from));
          end = to;
        }
        writer.flush(dropped, end);
        writer.finish(end);
      },
      nb::arg("descriptor"), nb::arg("records"), nb::arg("dropped"));
}

// Blocks that lie one after the other: block i between begins[i] and begins[i + 1].
std::vector<Range> blocks_between(const std::vector<size_t>& begins) {
  std::vector<Range> blocks;
  for (size_t i = 0; i + 1 < begins.size(); ++i) blocks.push_back({begins[i], begins[i + 1] - begins[i]});
  return blocks;
}

void bind_schedules(nb::module_& module) {
  const auto as_dict = [](const Schedule& schedule) {
    static constexpr const char* kThen[] = {"store", "reduce", "reduce_finish"};
    nb::list sends, receives;
    for (const Send& send : schedule.sends) sends.append(nb::make_tuple(send.peer, send.begin, send.count, send.after));
    for (const Receive& receive : schedule.receives) {
      receives.append(nb::make_tuple(receive.peer, receive.begin, receive.count, receive.after,
                                     kThen[static_cast<size_t>(receive.then)]));
    }
    return nb::make_tuple(sends, receives);
  };
  module.def("ring_reduce_scatter", [as_dict](int rank, int ranks, const std::vector<size_t>& begins, size_t segment) {
    return as_dict(ring_reduce_scatter(rank, ranks, blocks_between(begins), segment));
  });
  module.def("ring_allreduce", [as_dict](int rank, int ranks, size_t count, size_t segment) {
    return as_dict(ring_allreduce(rank, ranks, count, segment));
  });
  module.def("two_step_allreduce", [as_dict](int rank, int ranks, size_t count, size_t segment) {
    return as_dict(two_step_allreduce(rank, ranks, count, segment));
  });
  module.def("halving_allreduce", [as_dict](int rank, int ranks, size_t count, size_t segment) {
    return as_dict(halving_allreduce(rank, ranks, count, segment));
  });
  module.def("most_carried_bytes", &most_carried_bytes);
  module.def("pair_allreduce", [as_dict](int rank, size_t count, size_t segment) {
    return as_dict(pair_allreduce(rank, count, segment));
  });
  // Each rank sends its own block to all, within one buffer of all ranks' blocks.
  module.def("direct_allgather", [as_dict](int rank, int ranks, const std::vector<size_t>& begins, size_t segment) {
    const auto blocks = blocks_between(begins);
    const std::vector<Range> sent(blocks.size(), blocks.at(static_cast<size_t>(rank)));
    return as_dict(direct_exchange(rank, ranks, sent, blocks, segment));
  });
  module.def("tree_broadcast", [as_dict](int rank, int ranks, int root, size_t count, size_t segment) {
    return as_dict(tree_broadcast(rank, ranks, root, count, segment));
  });
  module.def("exchange_tags", [](const std::vector<std::vector<int>>& hosts, uint64_t chunk, int generation) {
    const HostShards shards(hosts, abi::MpiTags::kExchanges);
    std::vector<int> tags;
    for (size_t i = 0; i < shards.count; ++i) tags.push_back(abi::MpiTags(generation).exchange(chunk, shards.tag(i)));
    return tags;
  });
}

// The result of `compute` with the instructions of `level`; levels are numbered from 0. None if the processor lacks them.
template <class Compute>
nb::object with_instructions(int level, Compute compute) {
  nb::object result = nb::none();
  limit_instructions(static_cast<Instructions>(level));
  if (instructions() == static_cast<Instructions>(level)) result = compute();
  limit_instructions(Instructions::x86_64_v4);
  return result;
}

nb::object reduce_with(int level, int dtype, int op, const std::vector<nb::bytes>& values, double prescale,
                       double postscale, int divisor) {
  std::vector<const void*> sources;
  for (const nb::bytes& each : values) sources.push_back(each.c_str());
  std::string target(values.at(0).size(), '\0');
  const auto type = static_cast<DType>(dtype);
  return with_instructions(level, [&] {
    reduce(type, static_cast<ReduceOp>(op), target.data(), sources.data(), sources.size(),
           target.size() / bytes_of(type), {prescale, postscale, divisor});
    return as_bytes(target);
  });
}

// Copies the bytes of `source` from byte `from` on to byte `to` of `target`, and returns `target`.
nb::object copy_with(int level, const nb::bytes& source, size_t from, const nb::bytes& target, size_t to) {
  return with_instructions(level, [&] {
    std::string result(target.c_str(), target.size());
    copy_bytes(result.data() + to, source.c_str() + from, source.size() - from);
    return as_bytes(result);
  });
}

// The code of float32 values, the errors, and the sums of `others` and the decoded values.
nb::object code_with(int level, int kind, double share, uint64_t seed, const nb::bytes& values,
                     const std::optional<nb::bytes>& others) {
  return with_instructions(level, [&] {
    const Codec codec(static_cast<CodecKind>(kind), share);
    const size_t count = values.size() / sizeof(float);
    std::vector<float> errors(count), decoded(count);
    std::memcpy(errors.data(), values.c_str(), values.size());
    if (others) std::memcpy(decoded.data(), others->c_str(), values.size());
    std::string code(codec.bytes(count), '\0');
    codec.encode(errors.data(), count, reinterpret_cast<std::byte*>(code.data()), seed);
    codec.decode(reinterpret_cast<const std::byte*>(code.data()), decoded.data(), count, seed, others.has_value());
    const auto bytes = [](const std::vector<float>& of) { return nb::bytes(of.data(), of.size() * sizeof(float)); };
    return nb::make_tuple(as_bytes(code), bytes(errors), bytes(decoded));
  });
}

}  // namespace

void bind_testing(nb::module_& module) {
  bind_negotiation(module);
  bind_operation_table(module);
  bind_tree(module);
  bind_timeline(module);
  bind_schedules(module);
  module.def("lines", &lines);
  module.def("copy_with", &copy_with);
  module.def("code_with", &code_with, nb::kw_only(), nb::arg("level"), nb::arg("kind"), nb::arg("share"),
             nb::arg("seed"), nb::arg("values"), nb::arg("others"));
  module.def("set_clock", &set_clock, nb::arg("seconds").none());
  module.def("clock", [] { return std::chrono::duration<double>(ClockOfTests::micros).count(); });
  module.def("turn", &EngineByTurns::turn, nb::arg("engine"));
  module.def("die", &EngineByTurns::die, nb::arg("engine"));
  module.def("lose_peer", &EngineByTurns::lose_peer, nb::arg("engine"), nb::arg("local_rank"));
  module.def("waiting_costs", [] { return std::pair(waiting_costs().yield.count(), waiting_costs().wake.count()); });
  module.def("reduce_with", &reduce_with, nb::kw_only(), nb::arg("level"), nb::arg("dtype"), nb::arg("op"),
             nb::arg("values"), nb::arg("prescale"), nb::arg("postscale"), nb::arg("divisor"));
}

}  // namespace horovodish
