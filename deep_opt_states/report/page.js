// Draw the curves with uPlot, let the timelines be enlarged, and pass traces to Perfetto.
"use strict";

const inUnits = (units) => (value) => {
  const [name, size] = units.find(([, size]) => Math.abs(value) >= size) ?? units.at(-1);
  return value ? `${+(value / size).toPrecision(3)} ${name}` : "0";
};
const FORMATS = {
  s: inUnits([["s", 1], ["ms", 1e-3], ["us", 1e-6]]),
  bytes: inUnits([["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]),
};
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const data = (id) => document.getElementById(id).textContent;

// Curves

const curves = JSON.parse(data("curves"));
const frames = [...document.querySelectorAll(".chart")];
let plots = [];

function plot(frame) {
  const format = FORMATS[frame.dataset.unit];
  const shown = Object.entries(JSON.parse(frame.dataset.series)).filter(([quantity]) => quantity in curves);
  const axis = { stroke: colour("text"), grid: { stroke: colour("line") }, ticks: { stroke: colour("line") } };
  const series = shown.map(([, label], index) => ({
    label,
    stroke: colour(`series-${index}`),
    width: 2,
    spanGaps: true,
    points: { show: curves.step.length < 60, size: 5 },
    value: (_, value) => (value == null ? "–" : format(value)),
  }));
  const options = {
    width: frame.clientWidth,
    height: 240,
    scales: { x: { time: false }, y: { range: (_, least, most) => [0, 1.08 * most || 1] } },
    cursor: { sync: { key: "steps" } },
    axes: [axis, { ...axis, size: 72, values: (_, ticks) => ticks.map(format) }],
    series: [{ label: "step" }, ...series],
  };
  frame.replaceChildren();
  return new uPlot(options, [curves.step, ...shown.map(([quantity]) => curves[quantity])], frame);
}

const plotAll = () => {
  plots.forEach((each) => each.destroy());
  plots = frames.map(plot);
};
plotAll();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", plotAll);
addEventListener("resize", () => plots.forEach((each, index) => each.setSize({ width: frames[index].clientWidth, height: 240 })));

// Timelines

function element(parent, name, attributes, text = "") {
  const added = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) added.setAttribute(key, value);
  added.textContent = text;
  parent.append(added);
}

for (const figure of document.querySelectorAll(".timeline")) {
  const svg = figure.querySelector("svg"), lanes = svg.querySelector(".lanes"), axis = svg.querySelector(".axis");
  const [startMs, endMs, bottom] = ["start", "end", "bottom"].map((name) => Number(svg.dataset[name]));
  // The shown part of the timeline, as shares of the whole.
  let left = 0, width = 1;

  function show(newLeft, newWidth) {
    width = Math.min(1, Math.max(1e-4, newWidth));
    left = Math.min(1 - width, Math.max(0, newLeft));
    lanes.setAttribute("x", `${(-100 * left) / width}%`);
    lanes.setAttribute("width", `${100 / width}%`);
    const pixels = svg.clientWidth / width;
    for (const bar of lanes.children) {
      const label = bar.querySelector("text");
      const fits = 7 * label.textContent.length + 4 < (parseFloat(bar.getAttribute("width")) / 100) * pixels;
      label.setAttribute("visibility", fits ? "visible" : "hidden");
    }
    const perMs = pixels / (endMs - startMs), power = 10 ** Math.floor(Math.log10(90 / perMs));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power * perMs >= 90);
    axis.replaceChildren();
    const offset = left * (endMs - startMs) + startMs;
    for (let ms = Math.ceil(offset / step) * step; (ms - offset) * perMs < svg.clientWidth - 50; ms += step) {
      const x = (ms - offset) * perMs;
      element(axis, "line", { x1: x, x2: x, y1: 0, y2: bottom });
      element(axis, "text", { x: x + 3, y: bottom + 14 }, `${+ms.toPrecision(6)} ms`);
    }
  }
  const zoom = (factor, at = 0.5) => show(left + at * (width - Math.min(1, width * factor)), width * factor);

  figure.querySelectorAll("button[data-zoom]").forEach((button) => {
    button.addEventListener("click", () => zoom(Number(button.dataset.zoom)));
  });
  svg.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(event.deltaY < 0 ? 0.8 : 1.25, event.offsetX / svg.clientWidth);
  }, { passive: false });
  svg.addEventListener("dblclick", () => show(0, 1));
  svg.addEventListener("pointerdown", (event) => svg.setPointerCapture(event.pointerId));
  svg.addEventListener("pointermove", (event) => {
    if (event.buttons === 1) show(left - (event.movementX / svg.clientWidth) * width, width);
  });
  addEventListener("resize", () => show(left, width));
  show(0, 1);

  // Perfetto: https://perfetto.dev/docs/visualization/deep-linking-to-perfetto-ui
  const trace = data(figure.dataset.trace), origin = "https://ui.perfetto.dev";
  figure.querySelector("a[download]").href = URL.createObjectURL(new Blob([trace], { type: "application/json" }));
  figure.querySelector("button.perfetto").addEventListener("click", () => {
    const tab = open(origin);
    const ping = setInterval(() => (tab?.closed ?? true) ? clearInterval(ping) : tab.postMessage("PING", origin), 100);
    addEventListener("message", function answered(event) {
      if (event.source !== tab || event.origin !== origin || event.data !== "PONG") return;
      clearInterval(ping);
      removeEventListener("message", answered);
      const buffer = new TextEncoder().encode(trace).buffer;
      tab.postMessage({ perfetto: { buffer, title: document.title, fileName: "timeline.json" } }, origin);
    });
  });
}
