"use strict";
// Draws the charts, and hands a step's trace to Perfetto. Everything else on the page is there without it.
const report = JSON.parse(document.getElementById("report").textContent);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const plots = new Map();  // by element

function draw(element) {
  plots.get(element)?.destroy();
  const chart = report.charts[Number(element.dataset.chart)];
  const axis = { stroke: color("soft"), grid: { stroke: color("line") }, ticks: { stroke: color("line") } };
  const series = chart.series.map((one) => ({
    label: one.label, stroke: color(one.color), width: one.fill ? 1 : 1.5, fill: one.fill ? color(one.color) : undefined,
    value: (_, value) => (value == null ? "-" : Number(value.toPrecision(3)) + " " + chart.unit),
  }));
  const decades = (_, splits) => splits.map((value) => (Math.log10(value) % 1 ? null : value));
  const values = (_, splits) => splits.map((value) => (value === null ? "" : String(value)));
  const high = chart.low ? { grid: { ...axis.grid, filter: decades }, values } : {};
  const options = {
    width: element.clientWidth, height: 240, series: [{ label: chart.x ?? "step" }, ...series],
    scales: {
      x: { time: false, distr: chart.log ? 3 : 1, log: chart.log ?? 10 },
      y: chart.low ? { distr: 3, range: () => [chart.low, chart.top * 1.05] } : { range: () => [0, chart.top * 1.05 || 1] },
    },
    axes: [{ ...axis, label: chart.x ?? "step", stroke: color("soft") }, { ...axis, label: chart.unit, size: 64, ...high }],
  };
  const plot = new uPlot(options, chart.data, element);
  const steps = chart.data[0];
  element.onkeydown = (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -steps.length, End: steps.length }[event.key];
    if (move === undefined) return;
    event.preventDefault();
    const index = Math.max(0, Math.min(steps.length - 1, (plot.cursor.idx ?? -1) + move));
    plot.setCursor({ left: plot.valToPos(steps[index], "x"), top: plot.bbox.height / 4 });
  };
  plots.set(element, plot);
}

// A chart is drawn when it is about to be seen, or printed.
const elements = document.querySelectorAll(".chart");
const watch = new IntersectionObserver((changes) => {
  for (const change of changes.filter((each) => each.isIntersecting)) {
    watch.unobserve(change.target);
    if (!plots.has(change.target)) draw(change.target);
  }
}, { rootMargin: "50%" });
for (const element of elements) watch.observe(element);

function print(isPrinted) {
  document.documentElement.classList.toggle("paper", isPrinted);
  elements.forEach((element) => draw(element));
}
addEventListener("beforeprint", () => print(true));
addEventListener("afterprint", () => print(false));
addEventListener("resize", () => {
  for (const [element, plot] of plots) plot.setSize({ width: element.clientWidth, height: 240 });
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => [...plots.keys()].forEach(draw));

// Perfetto answers PONG when it is there, and then takes a trace.
for (const button of document.querySelectorAll("button[data-trace]")) {
  button.onclick = () => {
    const viewer = open("https://ui.perfetto.dev");
    const trace = new TextEncoder().encode(document.getElementById("trace-" + button.dataset.trace).textContent);
    const timer = setInterval(() => viewer.postMessage("PING", "https://ui.perfetto.dev"), 100);
    addEventListener("message", function answered(event) {
      if (event.source !== viewer || event.data !== "PONG") return;
      clearInterval(timer);
      removeEventListener("message", answered);
      viewer.postMessage({ perfetto: { buffer: trace.buffer, title: button.dataset.title } }, "https://ui.perfetto.dev");
    });
  };
}
