"use strict";
// Shows what was computed for the chosen model, ranks, strategy, precision, link and scaling.
const its = report.prediction;
const form = document.getElementById("choices");
const chosen = (name) => Number(form.elements[name]?.value ?? 0);

// The texts are those of the command: three digits and a unit, and no digits after the point of the smallest one.
const digits = (number) => (number < 999.5 ? String(Number(number.toPrecision(3))) : number.toFixed(0));
function text(value, units) {
  const [unit, factor] = units.find(([, one]) => value >= one) ?? units.at(-1);
  return (unit === units.at(-1)[0] ? (value / factor).toFixed(0) : digits(value / factor)) + " " + unit;
}
const SECONDS = [["s", 1], ["ms", 1e-3], ["us", 1e-6]];
const BYTES = [["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["B", 1]];
const HOURS = [["days", 86400], ["h", 3600], ["min", 60], ...SECONDS];
const percent = (share) => (100 * share).toFixed(0) + " %";

// The parts of a step for each number of ranks. A strategy that refuses a precision has what was computed without it.
function steps(model, strategy, precision, link, scaling) {
  const exposed = model.exposed[scaling][link][strategy][precision] ?? model.exposed[scaling][link][strategy][0];
  const own = model.own[scaling], late = model.late[scaling][strategy];
  const step = own.map((value, index) => value + late[index] + exposed[index]);
  return { own, late, exposed, step, efficiency: own.map((value, index) => value / step[index]) };
}

function table(head, rows) {
  const row = (cells, tag) => "<tr>" + cells.map((cell) => `<${tag}>${cell}</${tag}>`).join("") + "</tr>";
  return `<table>${row(head, "th")}${rows.map((cells) => row(cells, "td")).join("")}</table>`;
}

// A chart takes the largest unit in which its largest value is at least 1.
function chart(number, series, units) {
  const most = Math.max(...series.flatMap((one) => one.values));
  const [unit, factor] = units.find(([, one]) => most >= one) ?? units.at(-1);
  const columns = series.map((one) => one.values.map((value) => value / factor));
  const labels = series.map(({ label, color }) => ({ label, color }));
  const one = report.charts[number];
  Object.assign(one, { unit, series: labels, data: [its.ranks, ...columns], top: most / factor });
  if (one.logarithmic) one.low = 10 ** Math.floor(Math.log10(Math.min(...columns.flat())));
  const rows = its.ranks.map((ranks, index) => [ranks, ...series.map((one) => text(one.values[index], units))]);
  document.getElementById("table" + number).innerHTML = table(["ranks", ...labels.map((one) => one.label)], rows);
}

// A bar for each strategy, whose parts are those of the step.
function bar([name, parts], most) {
  const part = (kind, seconds) => `<i class="${kind}" style="width:${(100 * seconds) / most}%"></i>`;
  const drawn = part("own", parts.own) + part("late", parts.late) + part("exposed", parts.exposed);
  return `<div class="bar"><span>${name}</span><span>${drawn}</span><span>${text(parts.step, SECONDS)}, ${percent(parts.efficiency)}</span></div>`;
}

function show() {
  const model = its.models[chosen("model")], at = chosen("ranks"), ranks = its.ranks[at];
  const strategy = chosen("strategy"), link = chosen("link"), scaling = chosen("scaling");
  [...form.elements.precision.options].forEach((option, index) => {
    option.disabled = model.exposed[scaling][link][strategy][index] === null;
    if (option.disabled && option.selected) form.elements.precision.value = 0;
  });
  const precision = chosen("precision");
  document.getElementById("many").textContent = ranks;
  form.elements.ranks.setAttribute("aria-valuetext", ranks);  // its value is a place in the list
  const of = steps(model, strategy, precision, link, scaling), plain = steps(model, 0, 0, link, scaling);
  const memories = model.memory[scaling], memory = memories[strategy];
  const hours = [0, 1].map((kind) => steps(model, strategy, precision, link, kind).step.map((seconds, index) => seconds * model.steps[kind][index]));
  const many = ranks === 1 ? "1 rank" : `${ranks} ranks`;
  const waits = [["communication", of.exposed[at]], ["late ranks", of.late[at]]].filter(([, seconds]) => seconds > 0);
  const said = [
    `With ${many} a step takes ${text(of.step[at], SECONDS)}: ${text(of.own[at], SECONDS)} of own work` +
      waits.map(([what, seconds]) => `, ${text(seconds, SECONDS)} of waiting for ${what}`).join("") + ".",
    `The efficiency is ${percent(of.efficiency[at])}, so ${many} ${ranks === 1 ? "does" : "do"} the work of ${digits(ranks * of.efficiency[at])}.`,
    `A rank needs ${text(memory[at], BYTES)}` +
      (its.rank_memory && memory[at] > its.rank_memory ? `, and has ${text(its.rank_memory, BYTES)}: it does not fit.` : "."),
  ];
  if (model.steps[0][at]) said.push(`Training takes ${text(hours[scaling][at], HOURS)}.`);
  document.getElementById("said").textContent = said.join(" ");
  const named = (name, index) => (model.exposed[scaling][link][index][precision] ? name : name + " as computed");
  const rows = its.strategies.map((name, index) => [named(name, index), steps(model, index, precision, link, scaling), memories[index][at]])
    .map(([name, parts, bytes]) => [name, Object.fromEntries(Object.entries(parts).map(([key, values]) => [key, values[at]])), bytes]);
  const most = Math.max(...rows.map(([, parts]) => parts.step));
  document.getElementById("bars").innerHTML = rows.map((row) => bar(row, most)).join("");
  document.getElementById("strategies").innerHTML = table(
    ["strategy", "step", "own work", "late ranks", "communication", "efficiency", "memory of a rank"],
    rows.map(([name, parts, bytes]) => [name, text(parts.step, SECONDS), text(parts.own, SECONDS), text(parts.late, SECONDS),
      text(parts.exposed, SECONDS), percent(parts.efficiency), text(bytes, BYTES)]),
  );
  chart(0, [
    { label: "step", color: "ink", values: of.step }, { label: "own work", color: "own", values: of.own },
    { label: "waits for late ranks", color: "late", values: of.late },
    { label: "waits for communication", color: "exposed", values: of.exposed },
  ], SECONDS);
  const beside = (values) => (strategy || precision ? [{ label: "plain allreduce", color: "exposed", values }] : []);
  const percents = (parts) => parts.efficiency.map((share) => 100 * share);
  chart(1, [{ label: "as chosen", color: "own", values: percents(of) }, ...beside(percents(plain))], [["%", 1]]);
  const has = its.rank_memory ? [{ label: "memory that it has", color: "late", values: its.ranks.map(() => its.rank_memory) }] : [];
  chart(2, [{ label: "as chosen", color: "own", values: memory }, ...beside(memories[0]), ...has], BYTES);
  document.getElementById("time").hidden = !model.steps[0][at];
  chart(3, [
    { label: "weak scaling", color: "own", values: hours[0] }, { label: "strong scaling", color: "late", values: hours[1] },
  ], HOURS);
  for (const element of plots.keys()) draw(element);
}
form.addEventListener("input", show);
form.addEventListener("submit", (event) => event.preventDefault());
show();
