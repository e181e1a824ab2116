// Explores the negotiation of three ranks exhaustively: every order in which they can submit and messages can arrive.
//
//     explore small|deep
//
// A world is a tree, a small cache and a script for each rank. From its first state the program follows every
// possible action from each state that it has not seen, and checks what must hold on every rank. "small" takes seconds,
// "deep" has longer scripts. Compiled with -fno-access-control, to copy and to compare states.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include "negotiation/negotiation.h"
#include "negotiation/request.h"

using namespace horovodish;

namespace {

constexpr size_t kRanks = 3;

// A step of a rank's script. Steps between two barriers are taken in any order; steps of one name keep their order.
//     x    submits x            x4   with another shape       x-   refuses it        f.x  x as part of the family f
//     J    joins, and waits for the other ranks               j    joins, and goes on submitting
//     |    waits for what it has submitted of families; the next ones are another run
struct Step {
  enum class Type { submit, join, join_and_go_on, next_run };
  Type type = Type::submit;
  std::string name, family, signature;
  std::string asked;  // what the ranks must agree about
  size_t run = 0;

  bool is_barrier() const { return type != Type::submit; }
};
using Script = std::vector<Step>;

Script parse(const std::string& text) {
  Script script;
  std::istringstream words(text);
  size_t run = 0;
  for (std::string word; words >> word;) {
    Step step;
    if (word == "J" || word == "j" || word == "|") {
      step.type = word == "J" ? Step::Type::join : word == "j" ? Step::Type::join_and_go_on : Step::Type::next_run;
      run += word == "|";
    } else {
      Request request;
      if (word.starts_with("f.")) {
        request.family.name = "f";
        word.erase(0, 2);
      }
      step.asked = word;
      request.name = word.substr(0, 1);
      if (word.ends_with("-")) request.refusal = "no";
      request.members = {{request.name, DType::float32, {word.ends_with("4") ? 4 : 3}}};
      step.name = request.name;
      step.family = request.family.name;
      step.signature = request.signature();
    }
    step.run = run;
    script.push_back(step);
  }
  return script;
}

struct World {
  bool chain;  // 0 - 1 - 2, else 1 and 2 stand below 0
  std::string before;  // a script that all ranks go through first, in one order
  std::vector<std::string> scripts;
  bool lag = false;  // a rank may submit before it has applied the decisions that have arrived
  size_t cache_capacity = 1;
};

[[noreturn]] void unexpected(const std::string& what) { throw std::logic_error(what); }

// The operations of a rank in a process set.
struct Rank {
  std::set<size_t> taken;  // steps
  std::map<std::string, size_t> undecided;  // by name, the step
  bool joined = false;
  std::set<size_t> failed_runs;
  size_t decisions = 0;  // of the log
};

// A decision that not every rank has applied.
struct Logged {
  std::string text;
  std::string asked = {};  // what a contributor asked for
  int joined = 0, contributors = 0;
};

struct State {
  std::vector<Negotiation> nodes;
  std::map<std::pair<int, int>, std::deque<std::string>> edges;
  std::vector<Rank> ranks{kRanks};
  std::deque<Logged> log;
  size_t applied_by_all = 0;
};

// Call it after a copy, because the tensors and the cached requests are other objects.
void relink(TensorTable& table) {
  const auto own = [&](const CachedRequest* theirs) { return table.find(theirs->id); };
  for (auto& [name, tensor] : table.by_name_) {
    tensor.name = name;
    for (CachedRequest*& request : tensor.cached) request = own(request);
    if (tensor.pending.by_id_ != 0) tensor.pending.cached_ = own(tensor.pending.cached_);
  }
  for (auto& [id, request] : table.by_id_) request.tensor = table.find(request.tensor->name);
  for (auto place = table.by_use_.begin(); place != table.by_use_.end(); ++place) {
    *place = own(*place);
    (*place)->place = place;
  }
}

State copy_of(const State& original) {
  State copy = original;
  for (Negotiation& node : copy.nodes) relink(node.tensors_);
  return copy;
}

bool remembers_nothing(const Negotiation& node) { return node.unacknowledged() == 0 && node.after_join_.empty(); }

void write_remembered(Writer& writer, const Negotiation& node) {
  const UnacknowledgedDecisions& kept = node.unacknowledged_;
  writer.number(kept.size());
  for (const auto& decided : kept.decided_) {
    const auto* forgotten = std::get_if<Forgotten>(&decided);
    writer.text(forgotten != nullptr ? forgotten->name : std::get<Fail>(decided).name);
    writer.number(forgotten != nullptr ? forgotten->id : 0);
  }
  for (const uint64_t acknowledged : kept.acknowledged_) writer.number(acknowledged - kept.dropped_);
  writer.number(node.after_join_.size());
  for (const auto& submission : node.after_join_) writer.text(submission.name);
}

class Explorer {
 public:
  explicit Explorer(const World& world) : world_(world) {
    for (const std::string& script : world.scripts) scripts_.push_back(parse(script));
  }

  // Returns false if a check fails; `path` then holds the actions that led there.
  bool explore(std::vector<std::string>& path, std::string& why) {
    try {
      visit(begin());
      return true;
    } catch (const std::exception& error) {
      path = path_;
      why = error.what();
      return false;
    }
  }
  size_t states() const { return seen_.size(); }

 private:
  struct Action {
    enum class Type { deliver, step, take } type;
    int from = 0, to = 0;  // of a delivery; otherwise the rank and the step
  };

  int parent_of(int rank) const { return rank == 0 ? -1 : world_.chain ? rank - 1 : 0; }
  std::vector<int> children_of(int rank) const {
    if (world_.chain) return rank + 1 < static_cast<int>(kRanks) ? std::vector<int>{rank + 1} : std::vector<int>{};
    return rank == 0 ? std::vector<int>{1, 2} : std::vector<int>{};
  }
  RankSet subtree_of(int rank) const {
    RankSet ranks{WorldRank(rank)};
    for (const int child : children_of(rank)) ranks.add(subtree_of(child));
    return ranks;
  }

  // All ranks go through the first script, without a choice.
  State begin() {
    State state;
    state.nodes.reserve(kRanks);
    for (int rank = 0; rank < static_cast<int>(kRanks); ++rank) {
      std::vector<RankSet> participants{RankSet(WorldRank(rank))};
      for (const int child : children_of(rank)) participants.push_back(subtree_of(child));
      state.nodes.emplace_back(rank == 0, std::move(participants), world_.cache_capacity);
    }
    for (const Step& step : parse(world_.before)) {
      for (size_t rank = 0; rank < kRanks; ++rank) {
        state.nodes[rank].submit(step.name, step.signature, {});
        post(state, static_cast<int>(rank));
      }
      for (auto edge = busy_edge(state); edge; edge = busy_edge(state)) deliver(state, edge->first, edge->second);
      for (Negotiation& node : state.nodes) {
        while (node.take_decision()) {
        }
      }
    }
    return state;
  }

  static std::optional<std::pair<int, int>> busy_edge(const State& state) {
    for (const auto& [edge, messages] : state.edges) {
      if (!messages.empty()) return edge;
    }
    return std::nullopt;
  }

  void visit(const State& state) {
    if (!seen_.insert(digest(state)).second) return;
    const auto actions = enabled(state);
    if (actions.empty()) check_end(state);
    for (const Action& action : actions) {
      path_.push_back(text(action));
      State next = copy_of(state);
      apply(next, action);
      visit(next);
      path_.pop_back();
    }
  }

  std::vector<Action> enabled(const State& state) const {
    std::vector<Action> actions;
    for (const auto& [edge, messages] : state.edges) {
      if (!messages.empty()) actions.push_back({Action::Type::deliver, edge.first, edge.second});
    }
    for (int rank = 0; rank < static_cast<int>(kRanks); ++rank) {
      if (world_.lag && !state.nodes[rank].decisions_.empty()) actions.push_back({Action::Type::take, rank, 0});
      for (size_t step = 0; step < scripts_[rank].size(); ++step) {
        if (may_take(state.ranks[rank], scripts_[rank], step)) {
          actions.push_back({Action::Type::step, rank, static_cast<int>(step)});
        }
      }
    }
    return actions;
  }

  static bool may_take(const Rank& rank, const Script& script, size_t index) {
    const Step& step = script[index];
    if (rank.taken.contains(index)) return false;
    for (size_t before = 0; before < index; ++before) {
      const Step& other = script[before];
      if (rank.taken.contains(before)) {
        if (rank.joined && other.type == Step::Type::join) return false;
      } else if (step.is_barrier() || other.is_barrier() || other.name == step.name) {
        return false;
      }
    }
    if (step.type == Step::Type::next_run) {
      return std::none_of(rank.undecided.begin(), rank.undecided.end(),
                          [&](const auto& entry) { return !script[entry.second].family.empty(); });
    }
    return step.type != Step::Type::submit || !rank.undecided.contains(step.name);
  }

  void apply(State& state, const Action& action) {
    switch (action.type) {
      case Action::Type::deliver:
        deliver(state, action.from, action.to);
        break;
      case Action::Type::take:
        take(state, action.from);
        break;
      case Action::Type::step:
        take_step(state, action.from, static_cast<size_t>(action.to));
        break;
    }
    for (int rank = 0; rank < static_cast<int>(kRanks) && !world_.lag; ++rank) {
      while (!state.nodes[rank].decisions_.empty()) take(state, rank);
    }
  }

  void deliver(State& state, int from, int to) {
    auto& messages = state.edges[{from, to}];
    const std::string message = std::move(messages.front());
    messages.pop_front();
    if (from == parent_of(to)) {
      state.nodes[to].from_parent(message);
    } else {
      const auto children = children_of(to);
      const auto child = std::find(children.begin(), children.end(), from) - children.begin();
      state.nodes[to].from_child(static_cast<size_t>(child) + 1, message);
    }
    post(state, to);
  }

  void post(State& state, int rank) {
    const std::string up = state.nodes[rank].take_for_parent(), down = state.nodes[rank].take_for_children();
    if (!up.empty() && rank != 0) state.edges[{rank, parent_of(rank)}].push_back(up);
    if (down.empty()) return;
    for (const int child : children_of(rank)) state.edges[{rank, child}].push_back(down);
  }

  void take_step(State& state, int number, size_t index) {
    Rank& rank = state.ranks[number];
    const Step& step = scripts_[number][index];
    rank.taken.insert(index);
    if (step.type == Step::Type::next_run) return;
    if (step.type != Step::Type::submit) {
      rank.joined = true;
      state.nodes[number].join();
    } else if (step.family.empty() || !rank.failed_runs.contains(step.run)) {
      rank.undecided[step.name] = index;
      state.nodes[number].submit(step.name, step.signature, {});
    }
    post(state, number);
  }

  void take(State& state, int number) {
    Rank& rank = state.ranks[number];
    const Decision decision = *state.nodes[number].take_decision();
    Logged& logged = at_its_place(state, rank, decision);
    if (const auto* decided = std::get_if<DecidedCollective>(&decision)) {
      execute(rank, number, *decided, logged);
    } else if (const auto* failed = std::get_if<Fail>(&decision)) {
      fail(rank, scripts_[number], *failed);
    } else if (std::holds_alternative<Joined>(decision)) {
      if (!rank.joined) unexpected("a join is done on rank " + std::to_string(number) + ", which has not joined");
      rank.joined = false;
    } else {
      unexpected("a decision of type " + std::to_string(decision.index()));
    }
    forget_log(state);
  }

  void execute(Rank& rank, int number, const DecidedCollective& decided, Logged& logged) const {
    const std::string what = " '" + decided.name + "' on rank " + std::to_string(number);
    if (!decided.submitted()) {
      if (!rank.joined) unexpected("it executes" + what + ", which has neither submitted it nor joined");
      return;
    }
    const auto undecided = rank.undecided.find(decided.name);
    if (undecided == rank.undecided.end()) unexpected("it executes" + what + ", which waits for no such thing");
    const std::string& asked = scripts_[number][undecided->second].asked;
    if (logged.contributors == 0) logged.asked = asked;
    if (logged.asked != asked) unexpected("it executes" + what + ", where others have asked for something else");
    rank.undecided.erase(undecided);
    ++logged.contributors;
  }

  static void fail(Rank& rank, const Script& script, const Fail& failed) {
    std::erase_if(rank.undecided, [&](const auto& entry) {
      const Step& step = script[entry.second];
      const bool in_family = std::count(failed.families.begin(), failed.families.end(), step.family) > 0;
      if (in_family) rank.failed_runs.insert(step.run);
      return in_family || step.name == failed.name;
    });
  }

  // Every rank sees the same decisions in the same order.
  static Logged& at_its_place(State& state, Rank& rank, const Decision& decision) {
    std::string text = std::to_string(decision.index());
    int joined = 0;
    if (const auto* decided = std::get_if<DecidedCollective>(&decision)) {
      joined = decided->joined_ranks;
      text += decided->name + ":" + std::to_string(joined);
    } else if (const auto* failed = std::get_if<Fail>(&decision)) {
      text += failed->name + ":" + failed->text;
    }
    const size_t place = rank.decisions++ - state.applied_by_all;
    if (place == state.log.size()) state.log.push_back({.text = text, .joined = joined});
    if (state.log[place].text != text) unexpected("the ranks see different decisions");
    return state.log[place];
  }

  // Checks what every rank has seen: the ranks that are not counted as joined have contributed.
  static void forget_log(State& state) {
    const auto least = [&] {
      size_t all = state.ranks[0].decisions;
      for (const Rank& rank : state.ranks) all = std::min(all, rank.decisions);
      return all;
    };
    for (const size_t all = least(); state.applied_by_all < all; ++state.applied_by_all) {
      const Logged& oldest = state.log.front();
      if (oldest.text[0] == '0' && oldest.joined + oldest.contributors != static_cast<int>(kRanks)) {
        unexpected("a rank counts as joined and contributes: " + oldest.text);
      }
      state.log.pop_front();
    }
  }

  // No action is left: every operation has ended, and nothing is remembered.
  void check_end(const State& state) const {
    for (size_t i = 0; i < kRanks; ++i) {
      const Rank& rank = state.ranks[i];
      const Negotiation& node = state.nodes[i];
      const std::string at = " on rank " + std::to_string(i);
      if (!rank.undecided.empty()) unexpected("'" + rank.undecided.begin()->first + "' never ends" + at);
      if (rank.joined) unexpected("a join never ends" + at);
      if (rank.taken.size() != scripts_[i].size()) unexpected("the script never ends" + at);
      if (node.anything_pending()) unexpected("a statement is left" + at + ": " + node.describe_pending());
      if (!remembers_nothing(node)) unexpected("something is remembered for ever" + at);
    }
  }

  std::string text(const Action& action) const {
    const std::string from = std::to_string(action.from), to = std::to_string(action.to);
    if (action.type == Action::Type::deliver) return from + "->" + to;
    if (action.type == Action::Type::take) return "rank " + from + " takes a decision";
    std::istringstream words(world_.scripts[action.from]);
    std::string word;
    for (int i = 0; i <= action.to; ++i) words >> word;
    return "rank " + from + ": " + word;
  }

  // Two hashes of the part of the state that determines the possible actions.
  static std::pair<uint64_t, uint64_t> digest(const State& state) {
    Writer writer;
    for (const Negotiation& node : state.nodes) write(writer, node);
    for (const auto& [edge, messages] : state.edges) {
      if (messages.empty()) continue;
      writer.signed_number(edge.first);
      writer.signed_number(edge.second);
      writer.number(messages.size());
      for (const std::string& message : messages) writer.text(message);
    }
    for (const Rank& rank : state.ranks) {
      writer.number(rank.taken.size());
      for (const size_t step : rank.taken) writer.number(step);
      writer.number(rank.undecided.size());
      for (const auto& [name, step] : rank.undecided) writer.number(step);
      writer.number(rank.joined);
      writer.number(rank.failed_runs.size());
      for (const size_t run : rank.failed_runs) writer.number(run);
      writer.number(rank.decisions - state.applied_by_all);
    }
    writer.number(state.log.size());
    for (const Logged& logged : state.log) {
      writer.text(logged.text);
      writer.text(logged.asked);
      writer.signed_number(logged.contributors);
    }
    const std::string all = writer.take();
    uint64_t other = 14695981039346656037ULL;  // FNV-1a
    for (const char byte : all) other = (other ^ static_cast<unsigned char>(byte)) * 1099511628211ULL;
    return {std::hash<std::string>{}(all), other};
  }

  // Leaves out times, which determine nothing.
  static void write(Writer& writer, const Negotiation& node) {
    writer.number(node.participants_.joined);
    writer.number(node.joined_sent_);
    writer.signed_number(number_of(node.last_joined_));
    const TensorTable& table = node.tensors_;
    writer.number(table.uses_);
    writer.number(table.last_id_);
    for (const CachedRequest* request : table.by_use_) {
      writer.number(request->id);
      writer.text(request->signature);
      writer.number(request->last_use);
    }
    const std::map<size_t, TensorTable::Refused> refused(table.refused_.begin(), table.refused_.end());
    writer.number(refused.size());
    for (const auto& [name, its] : refused) {
      writer.number(name);
      writer.number(its.last);
      writer.number(its.before);
    }
    for (const std::string& name : table.pending()) write_pending(writer, *table.find(name));
    const auto untaken = std::span(node.decisions_).subspan(node.taken_);
    writer.number(untaken.size());
    for (const Decision& decision : untaken) {
      writer.number(decision.index());
      const auto* decided = std::get_if<DecidedCollective>(&decision);
      const auto* failed = std::get_if<Fail>(&decision);
      writer.text(decided != nullptr ? decided->name : failed != nullptr ? failed->name : std::string());
      writer.number(decided != nullptr && decided->submitted());
    }
    write_remembered(writer, node);
  }

  static void write_pending(Writer& writer, const Tensor& tensor) {
    const Pending& pending = tensor.pending;
    writer.text(tensor.name);
    writer.number(pending.stated_);
    writer.number(pending.by_id_);
    if (pending.by_id_ != 0) writer.number(pending.cached_->id);
    writer.write(pending.joined_);
    writer.number(pending.passed_up_);
    writer.write(pending.in_full_);
  }

  struct Hash {
    size_t operator()(const std::pair<uint64_t, uint64_t>& digest) const { return digest.first; }
  };

  const World& world_;
  std::vector<Script> scripts_;
  std::unordered_set<std::pair<uint64_t, uint64_t>, Hash> seen_;
  std::vector<std::string> path_;
};

// The ranks agree about x, or differ, or one refuses it; then they go on. Perhaps one joins before it goes on.
std::vector<World> disagreements(bool deep) {
  const std::string next = deep ? " y x" : " y";
  std::vector<World> worlds;
  for (const bool chain : {false, true}) {
    // The cache knows nothing, or x until y takes its place, or x with both shapes until y takes the place of one.
    for (const std::string before : {"", "x y y", "x x4 y y"}) {
      const size_t capacity = before.starts_with("x x4") ? 2 : 1;
      for (const std::string root : {"x", "x4", "x-"}) {
        for (const std::string first : {"x", "x4", "x-"}) {
          for (const std::string second : {"x", "x4", "x-"}) {
            if (!chain && first < second) continue;  // the same world with other numbers
            const std::vector<std::string> begin{root, first, second};
            worlds.push_back({chain, before, {root + next, first + next, second + next}, false, capacity});
            for (size_t early = 0; early < kRanks && deep; ++early) {
              std::vector<std::string> scripts;
              for (size_t i = 0; i < kRanks; ++i) scripts.push_back(begin[i] + (i == early ? "" : next) + " J");
              worlds.push_back({chain, before, std::move(scripts), false, capacity});
            }
          }
        }
      }
    }
  }
  return worlds;
}

std::vector<World> others(bool deep) {
  const std::vector<std::vector<std::string>> scripts = {
      // x leaves the cache while the ranks disagree about it, or while one joins.
      {"x4 y x", "x y x", "x y x"},
      {"y x J", "x y J", "y x J"},
      {"y x J", "x y J", "y J"},
      // The signature changes on every rank, and one disagrees the second time.
      {"x4 y x", "x4 y x", "x4 y x"},
      {"x4 x x4", "x4 x x4", "x4 x4 x"},
      // The ranks disagree about one operation of a family and do it all again.
      {"f.x4 f.y | f.x f.y", "f.x f.y | f.x f.y", "f.x f.y | f.x f.y"},
      {"f.x4 | f.x f.y", "f.x f.y | f.x f.y", "f.x f.y | f.x f.y"},
      {"f.x- | f.x f.y", "f.x f.y | f.x f.y", "f.y f.x | f.x f.y"},
      // One rank calls y outside of the family, and another one joins.
      {"f.x4 | f.x f.y", "y f.x | f.x", "f.x f.y | f.x f.y"},
      {"f.x4 | f.x f.y J", "y f.x | f.x J", "f.x f.y J"},
      {"f.x4 | f.x f.y J", "f.x f.y J", "y f.x | f.x J"},
      {"f.x4 J", "y f.x J", "f.x f.y J"},
      {"f.x4 y J", "y f.x J", "f.x f.y J"},
      {"f.x4 y y J", "y f.x y J", "f.x f.y J"},
      {"J", "f.x4 y | f.x J", "f.x f.y | f.x f.y J"},
      // A rank that has joined goes on submitting.
      {"x J x", "j x", "x J x"},
      {"x J x", "x J x", "j x"},
  };
  std::vector<World> worlds;
  for (const bool chain : {false, true}) {
    // One rank calls x outside of the family, which is no disagreement. The cache knows both and has room.
    worlds.push_back({chain, "x f.x", {"f.x f.x", "x x", "f.x x"}, false, 3});
    for (const auto& one : scripts) {
      const bool of_family = one[0].starts_with("f.");
      worlds.push_back({chain, of_family ? "f.x f.y f.y" : "x y y", one});
      if (of_family && deep) worlds.push_back({chain, "f.y f.x f.x", one, true});
      if (of_family) worlds.push_back({chain, "f.x f.x4 f.y f.y", one, false, 2});
    }
  }
  return worlds;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: explore small|deep\n");
    return 2;
  }
  const bool deep = std::string(argv[1]) == "deep";
  std::vector<World> worlds = disagreements(deep);
  for (World& world : others(deep)) worlds.push_back(std::move(world));
  size_t states = 0, wrong = 0;
  for (const World& world : worlds) {
    Explorer explorer(world);
    std::vector<std::string> path;
    std::string why;
    const bool right = explorer.explore(path, why);
    states += explorer.states();
    if (right) continue;
    if (++wrong > 3) continue;
    std::printf("%s", world.chain ? "chain" : "star");
    for (const std::string& script : world.scripts) std::printf(", \"%s\"", script.c_str());
    std::printf(" after \"%s\": %s\n", world.before.c_str(), why.c_str());
    for (const std::string& action : path) std::printf("    %s\n", action.c_str());
  }
  std::printf("%zu worlds, %zu states, %zu worlds in which something does not hold\n", worlds.size(), states, wrong);
  return wrong == 0 ? 0 : 1;
}
