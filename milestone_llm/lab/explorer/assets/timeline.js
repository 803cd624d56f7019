// The timeline of a run: a line for each request, and below it lanes: rows and tokens of each step,
// and KV memory. What does not change with the cursor is drawn once on canvases; the cursor is a
// narrow element above them, so that moving it costs next to nothing.

const GUTTER = 100; // names on the left
const MARGIN = 14;
const LANE = 42; // height of each of the three lanes
const AXIS = 20;
const GAP_FROM = 6; // pixels of a step: narrower ones have no gap, which would flicker
const MARK_SIGNS = { admitted: "▲", preempted: "✕", resumed: "↻", copy_on_write: "◆", evict: "▽", finished: "●" };
const LANES = ["rows", "tokens", "KV tokens"];

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// A canvas as sharp as the screen is; coordinates are CSS pixels.
function prepare(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  const size = [width, height].map((length) => Math.max(1, Math.round(length * scale)));
  if (canvas.width !== size[0] || canvas.height !== size[1]) [canvas.width, canvas.height] = size;
  if (canvas.style.height !== `${height}px`) canvas.style.height = `${height}px`; // a new layout
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

// Lines that go on from one rectangle to the next.
function hatch(context, x, y, width, height, color, slope, gap = 5) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = color;
  context.lineWidth = 1;
  context.beginPath();
  const begin = slope > 0 ? x + y : x - y - height; // of the lines x + y = n gap, or x - y = n gap
  for (let at = Math.floor(begin / gap) * gap; at < begin + width + height; at += gap) {
    context.moveTo(slope > 0 ? at - y : at + y, y);
    context.lineTo(slope > 0 ? at - y - height : at + y + height, y + height);
  }
  context.stroke();
  context.restore();
}

// What was computed for nobody; the pictures of milestone_llm/lab/plots have it, too.
function drawWaste(context, x, y, width, height) {
  context.fillStyle = css("--waste-pale");
  context.fillRect(x, y, width, height);
  hatch(context, x, y, width, height, css("--waste"), 1, 4);
}

// What is reserved and empty: nobody has computed anything there.
function drawReserved(context, x, y, width, height) {
  context.fillStyle = css("--waste-pale");
  context.fillRect(x, y, width, height);
  for (const slope of [1, -1]) hatch(context, x, y, width, height, css("--waste"), slope, 9);
}

// A colour of the style sheet, "waste", "reserved", or "cached".
function fillArea(context, fill, x, y, width, height) {
  if (fill === "waste") return drawWaste(context, x, y, width, height);
  if (fill === "reserved") return drawReserved(context, x, y, width, height);
  if (fill === "cached") return hatch(context, x, y, width, height, css("--soft"), -1, 5);
  context.fillStyle = css(fill);
  context.fillRect(x, y, width, height);
}

// Phases differ in height and pattern: the colour is the request's.
function drawPhase(context, phase, x, y, width, height, color, share = 0) {
  const inner = Math.max(2, Math.round(height * 0.78));
  const top = y + (height - inner) / 2;
  const w = Math.max(0.7, width);
  context.fillStyle = context.strokeStyle = color;
  context.lineWidth = 1;
  if (phase === "prefill") {
    context.fillRect(x, top, w, inner);
    if (share) {
      context.fillStyle = css("--card");
      context.fillRect(x + 1, top + 1, Math.max(1, w - 2), Math.max(2, inner * share - 1));
      hatch(context, x + 1, top + 1, Math.max(1, w - 2), Math.max(2, inner * share - 1), color, 1, 3);
    }
  } else if (phase === "decode") {
    const thin = Math.max(1.5, inner * 0.5);
    context.fillRect(x, y + (height - thin) / 2, w, thin);
  } else if (phase === "waiting") {
    context.fillStyle = css("--soft");
    for (let dot = x; dot < x + w; dot += 4) context.fillRect(dot, y + height / 2 - 0.6, Math.min(1.6, w), 1.4);
  } else if (phase === "padding") drawWaste(context, x, top, w, inner);
  else {
    hatch(context, x, top, w, inner, color, phase === "swapped" ? -1 : 1, phase === "swapped" ? 3 : 5);
    context.fillRect(x, top + inner - 1, w, 1);
  }
}

// Of all runs: what stands side by side has one scale.
function mostOf(value) {
  return views.reduce((most, { run }) => run.records.reduce((most, record, at) => Math.max(most, value(run, at)), most), 1);
}

function makeTimeline(view) {
  const { run, box } = view;
  const [rows, lanes] = [box.querySelector(".rows canvas"), box.querySelector(".lanes canvas")];
  const timeline = { rowHeight: 18, width: 0 };
  const scale = () => (timeline.width - GUTTER - MARGIN) / (state.to - state.from);
  const xOf = (time) => GUTTER + (time - state.from) * scale();
  const edges = (from, to = from) => [xOf(stepBegin(run, from, state.axis)), xOf(stepEnd(run, to, state.axis))];
  const timeOf = (x) => state.from + (x - GUTTER) / scale();

  function clipped(context, height, draw) {
    context.save();
    context.beginPath();
    context.rect(GUTTER, 0, timeline.width - GUTTER - MARGIN + 1, height);
    context.clip();
    draw();
    context.restore();
  }

  timeline.draw = () => {
    timeline.width = rows.clientWidth;
    const count = run.requests.size;
    timeline.rowHeight = Math.max(6, Math.min(22, Math.floor(190 / Math.max(1, count))));
    drawRows(prepare(rows, timeline.width, Math.max(22, count * timeline.rowHeight + 4)));
    drawLanes(prepare(lanes, timeline.width, 3 * LANE + AXIS));
    timeline.move();
  };

  function drawRows(context) {
    const height = timeline.rowHeight;
    context.textBaseline = "middle";
    context.font = `${height > 14 ? 12 : 10}px system-ui, sans-serif`;
    for (const request of run.requests.values()) {
      const y = 2 + request.index * height;
      if (request.index % Math.ceil(12 / height)) continue;
      context.fillStyle = request.color;
      context.fillRect(12, y + height / 2 - 4, 8, 8);
      context.fillStyle = css("--text");
      context.fillText(short(request.name), 26, y + height / 2 + 0.5);
    }
    clipped(context, rows.height, () => {
      for (const request of run.requests.values()) {
        const y = 2 + request.index * height;
        for (const span of request.spans) {
          const [x, end] = edges(span.from, span.to);
          if (end < GUTTER || x > timeline.width) continue;
          drawPhase(context, span.phase, x, y, end - x, height, request.color, span.cachedShare);
        }
      }
      drawStepLines(context);
      drawMarks(context, height, css("--text"));
      drawFrame(context);
    });
  }

  // Around the step that the page is about.
  function drawFrame(context) {
    if (run.lookAt === null) return;
    const [x, end] = edges(run.lookAt);
    context.strokeStyle = css("--text");
    context.lineWidth = 2;
    context.setLineDash([5, 3]);
    context.strokeRect(x, 1, Math.max(4, end - x), rows.clientHeight - 2);
    context.setLineDash([]);
  }

  // Where single steps can be told apart, a gap between them.
  function drawStepLines(context) {
    if (state.axis !== "steps" || scale() < 9) return;
    context.fillStyle = css("--card");
    for (let at = Math.ceil(state.from); at < state.to; at++) context.fillRect(xOf(at) - 0.5, 0, 1, rows.height);
  }

  function drawMarks(context, height, color) {
    if (height < 12) return;
    context.font = "9px system-ui, sans-serif";
    context.textAlign = "center";
    const taken = new Set();
    for (const { at, kind, name } of run.marks) {
      if (kind === "evict" || kind === "admitted") continue;
      const ends = kind === "finished" || kind === "preempted";
      const x = edges(at)[Number(ends)] + (ends ? -5 : 5);
      const y = 2 + requestOf(run, name).index * height + height / 2;
      const place = `${name}:${Math.round(x / 7)}`;
      if (taken.has(place)) continue;
      taken.add(place);
      context.fillStyle = css("--card");
      context.beginPath();
      context.arc(x, y, 5.6, 0, 7);
      context.fill();
      context.fillStyle = color;
      context.fillText(MARK_SIGNS[kind], x, y + 0.5);
    }
    context.textAlign = "left";
  }

  // Per lane what is stacked in it, from below: a fill, and how much of it a step has.
  function layers() {
    const numOf = (phase) => (at) => run.records[at].batch.reduce((sum, row) => sum + (row.phase === phase), 0);
    const tokensOf = (phase) => (at) => run.records[at][`num_${phase}_tokens`];
    const ofPhases = (count) => [["--decode", count("decode")], ["--prefill", count("prefill")], ["waste", count("padding")]];
    const usage = (value) => (at) => value(run.usage[at]);
    return [ofPhases(numOf), ofPhases(tokensOf), [
      ["--stored", usage(({ stored }) => stored)], ["reserved", usage(({ stored, reserved }) => Math.max(0, reserved - stored))],
      ["cached", usage(({ cached }) => cached)],
    ]];
  }

  function drawLanes(context) {
    const most = [mostOf((run, at) => run.records[at].batch.length), mostOf((run, at) => stepTokens(run.records[at]))];
    most.push(mostOf((run, at) => run.usage[at].reserved + run.usage[at].cached));
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "top";
    context.fillStyle = css("--soft");
    LANES.forEach((name, lane) => {
      context.fillText(inLanguage(name), 12, lane * LANE + 8);
      context.fillText(inLanguage(`to ${most[lane].toLocaleString("en")}`), 12, lane * LANE + 22);
    });
    const stacks = layers();
    clipped(context, lanes.height, () => {
      stacks.forEach((stack, lane) => {
        for (const [x, end, at] of columns(stack)) drawColumn(context, x, end - x, stack, at, (lane + 1) * LANE - 3, (LANE - 9) / most[lane]);
      });
    });
    drawAxis(context, css("--soft"));
  }

  // Whole pixels for each step; of those that share one, the highest.
  function columns(stack) {
    const found = [];
    const height = (at) => stack.reduce((sum, [, count]) => sum + count(at), 0);
    for (let at = 0; at < run.records.length; at++) {
      const [begin, right] = edges(at).map(Math.round);
      const end = Math.max(begin + 1, right);
      if (end < GUTTER || begin > timeline.width) continue;
      const last = found[found.length - 1];
      if (!last || begin >= last[1]) found.push([begin, end, at]);
      else if (height(at) > height(last[2])) last[2] = at;
    }
    return found;
  }

  function drawColumn(context, x, width, stack, at, bottom, unit) {
    const w = width >= GAP_FROM ? width - 1 : width;
    let base = bottom;
    for (const [fill, count] of stack) {
      const size = count(at);
      if (!size) continue;
      const height = Math.max(1, size * unit);
      base -= size * unit;
      fillArea(context, fill, x, base, w, height);
    }
  }

  function drawAxis(context, color) {
    const span = state.to - state.from;
    const most = Math.max(2, Math.min(8, Math.floor((timeline.width - GUTTER) / 52))); // labels side by side
    const digit = 10 ** Math.floor(Math.log10(span / most));
    const unit = [1, 2, 5, 10].map((factor) => factor * digit).find((size) => span / size <= most) || digit * 10;
    const each = state.axis === "steps" ? Math.max(1, Math.round(unit)) : unit;
    const first = run.records[0].step; // of a live page it is not 0
    context.fillStyle = color;
    context.textAlign = "center";
    for (let time = Math.ceil(state.from / each) * each; time <= state.to; time += each) {
      const x = xOf(time);
      const label = state.axis === "steps" ? (run.records[time]?.step ?? first + time) : `${Number(time.toFixed(3))} s`;
      if (x > timeline.width - 20) break;
      context.fillRect(x, 3 * LANE, 1, 4);
      context.fillText(label, x, 3 * LANE + 6);
    }
    context.textAlign = "left";
  }

  timeline.move = () => {
    if (!run.records.length) return;
    const [left, right] = edges(view.at);
    const begin = Math.max(GUTTER, left);
    const end = Math.max(begin + 1, right);
    const isInside = right > GUTTER && left < timeline.width - MARGIN;
    for (const line of box.querySelectorAll(".line-now, .here")) {
      line.style.transform = `translateX(${begin}px)`;
      line.style.display = isInside ? "" : "none";
      if (line.className === "here") line.style.width = `${end - begin}px`;
    }
    for (const veil of box.querySelectorAll(".veil")) veil.style.left = `${end}px`;
  };

  // Which request a point of the upper canvas belongs to.
  timeline.requestAt = (y) => [...run.requests.values()][Math.floor((y - 2) / timeline.rowHeight)];

  timeline.light = () => {
    const lit = box.querySelector(".lit");
    const request = run.requests.get(state.lit);
    lit.style.display = request ? "block" : "none";
    if (!request) return;
    lit.style.top = `${2 + request.index * timeline.rowHeight}px`;
    lit.style.height = `${Math.max(6, timeline.rowHeight)}px`;
  };

  for (const canvas of [rows, lanes]) {
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      moveTo(timeOf(event.offsetX));
    });
    canvas.addEventListener("pointermove", (event) => {
      if (event.buttons) moveTo(timeOf(event.offsetX));
      else if (canvas === rows) light(timeline.requestAt(event.offsetY)?.name ?? null);
    });
    canvas.addEventListener("pointerleave", () => light(null));
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.shiftKey) return; // plain wheel scrolls the page
      event.preventDefault();
      if (event.ctrlKey) zoom(event.deltaY > 0 ? 1.25 : 0.8, timeOf(event.offsetX));
      else pan((event.deltaY + event.deltaX) / scale());
    }, { passive: false });
  }
  return timeline;
}
