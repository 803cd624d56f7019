// The timeline of a run: a line for each request, and below it lanes: rows and tokens of each step,
// and KV memory. What does not change with the cursor is drawn once on canvases; the cursor is a
// narrow element above them, so that moving it costs next to nothing.

const GUTTER = 92; // names on the left
const MARGIN = 14;
const LANE = 46; // height of each of the three lanes
const AXIS = 20;
const MARK_SIGNS = { admitted: "▲", preempted: "✕", resumed: "↻", copy_on_write: "◆", evict: "▽", finished: "●" };

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

function hatch(context, x, y, width, height, color, slope, gap = 5) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = color;
  context.lineWidth = 1;
  context.beginPath();
  const first = Math.floor((x - height) / gap) * gap; // so that neighbours go on with it
  for (let at = first; at < x + width + height; at += gap) {
    context.moveTo(at, slope > 0 ? y + height : y);
    context.lineTo(at + height, slope > 0 ? y : y + height);
  }
  context.stroke();
  context.restore();
}

// Phases differ in height and pattern, not in colour alone: the colour is the request's.
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
  } else if (phase === "padding") {
    context.strokeStyle = css("--soft");
    if (w > 2 && inner > 3) context.strokeRect(x + 0.5, top + 0.5, w - 1, inner - 1);
    hatch(context, x, top, w, inner, css("--soft"), -1, 4);
  } else {
    hatch(context, x, top, w, inner, color, phase === "swapped" ? -1 : 1, phase === "swapped" ? 3 : 5);
    context.fillRect(x, top + inner - 1, w, 1);
  }
}

function makeTimeline(view) {
  const { run, box } = view;
  const [rows, lanes] = [box.querySelector(".rows canvas"), box.querySelector(".lanes canvas")];
  const timeline = { rowHeight: 18, width: 0 };
  const scale = () => (timeline.width - GUTTER - MARGIN) / (state.to - state.from);
  const xOf = (time) => GUTTER + (time - state.from) * scale();
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
    timeline.width = box.clientWidth;
    const count = run.requests.size;
    timeline.rowHeight = Math.max(5, Math.min(22, Math.floor(300 / Math.max(1, count))));
    drawRows(prepare(rows, timeline.width, Math.max(22, count * timeline.rowHeight + 4)));
    drawLanes(prepare(lanes, timeline.width, 3 * LANE + AXIS));
    timeline.move();
  };

  function drawRows(context) {
    const height = timeline.rowHeight;
    const [soft, text] = [css("--soft"), css("--text")];
    context.textBaseline = "middle";
    context.font = `${height > 14 ? 12 : 10}px system-ui, sans-serif`;
    for (const request of run.requests.values()) {
      const y = 2 + request.index * height;
      if (height >= 12) {
        context.fillStyle = request.color;
        context.fillRect(12, y + height / 2 - 5, 10, 10);
        context.fillStyle = text;
        context.fillText(shorten(request.name, 8), 28, y + height / 2 + 0.5);
      } else if (height < 12 && request.index % Math.ceil(14 / height) === 0) {
        context.fillStyle = soft;
        context.fillText(shorten(request.name, 10), 12, y + height / 2 + 0.5);
      }
    }
    clipped(context, rows.height, () => {
      for (const request of run.requests.values()) {
        const y = 2 + request.index * height;
        for (const span of request.spans) {
          const [x, end] = [xOf(stepBegin(run, span.from, state.axis)), xOf(stepEnd(run, span.to, state.axis))];
          if (end < GUTTER || x > timeline.width) continue;
          drawPhase(context, span.phase, x, y, end - x, height, request.color, span.cachedShare);
        }
      }
      drawStepLines(context);
      drawMarks(context, height, text);
    });
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
      const x = xOf(ends ? stepEnd(run, at, state.axis) : stepBegin(run, at, state.axis)) + (ends ? -5 : 5);
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

  function drawLanes(context) {
    const { width } = timeline;
    const [soft, accent, decode] = [css("--soft"), css("--accent"), css("--decode")];
    const unit = run.records[0] ? run.records[0].kv.unit : "block";
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = soft;
    context.textBaseline = "top";
    const lane = (at, name, most) => {
      context.fillText(name, 12, at * LANE + 8);
      context.fillText(`to ${most.toLocaleString("en")}`, 12, at * LANE + 23);
    };
    const mostRows = largest(run.records, (record) => record.batch.length);
    const mostTokens = largest(run.records, stepTokens);
    const mostUnits = largest(run.records, (record) => record.kv.total);
    lane(0, "rows", mostRows);
    lane(1, "tokens", mostTokens);
    lane(2, { token: "KV tokens", region: "KV regions", block: "KV blocks" }[unit], mostUnits);
    clipped(context, lanes.height, () => {
      let lastX = -1;
      run.records.forEach((record, at) => {
        const [x, end] = [xOf(stepBegin(run, at, state.axis)), xOf(stepEnd(run, at, state.axis))];
        if (end < GUTTER || x > width || Math.floor(end) === lastX) return;
        lastX = Math.floor(end);
        const w = Math.max(0.8, end - x - (end - x > 4 ? 1 : 0));
        let [base, most] = [0, 1];
        const begin = (at, top) => ([base, most] = [(at + 1) * LANE - 4, top]);
        const bar = (count, fill) => {
          const height = (count / most) * (LANE - 10);
          base -= height;
          if (!count) return;
          context.fillStyle = fill;
          if (fill === "hatch") hatch(context, x, base, w, height, soft, -1, 4);
          else context.fillRect(x, base, w, Math.max(1, height));
        };
        const numOf = (phase) => record.batch.filter((row) => row.phase === phase).length;
        begin(0, mostRows);
        bar(numOf("decode"), decode);
        bar(numOf("prefill"), accent);
        bar(numOf("padding"), "hatch");
        begin(1, mostTokens);
        bar(record.num_decode_tokens, decode);
        bar(record.num_prefill_tokens, accent);
        bar(record.num_padding_tokens, "hatch");
        begin(2, mostUnits);
        bar(record.kv.used, accent);
        bar(record.kv.cached, "hatch");
      });
    });
    drawAxis(context, soft);
  }

  function drawAxis(context, color) {
    const span = state.to - state.from;
    const digit = 10 ** Math.floor(Math.log10(span / 6));
    const unit = [1, 2, 5, 10].map((factor) => factor * digit).find((size) => span / size <= 8) || digit * 10;
    const each = state.axis === "steps" ? Math.max(1, Math.round(unit)) : unit;
    context.fillStyle = color;
    context.textAlign = "center";
    for (let time = Math.ceil(state.from / each) * each; time <= state.to; time += each) {
      const x = xOf(time);
      const label = state.axis === "steps" ? time : `${Number(time.toFixed(3))} s`;
      if (x > timeline.width - 20) break;
      context.fillRect(x, 3 * LANE, 1, 4);
      context.fillText(label, x, 3 * LANE + 6);
    }
    context.textAlign = "left";
  }

  timeline.move = () => {
    if (!run.records.length) return;
    const begin = Math.max(GUTTER, xOf(stepBegin(run, view.at, state.axis)));
    const end = Math.max(begin + 1, xOf(stepEnd(run, view.at, state.axis)));
    const isInside = end > GUTTER && begin < timeline.width - MARGIN;
    for (const line of box.querySelectorAll(".line")) {
      line.style.transform = `translateX(${begin}px)`;
      line.style.display = isInside ? "" : "none";
    }
    for (const here of box.querySelectorAll(".here")) {
      here.style.transform = `translateX(${begin}px)`;
      here.style.width = `${end - begin}px`;
      here.style.display = isInside ? "" : "none";
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

const largest = (records, value) => records.reduce((most, record) => Math.max(most, value(record)), 1);

// Long names are a server's, which begin alike: the end tells them apart.
function shorten(text, length) {
  return text.length <= length ? text : `…${text.slice(1 - length)}`;
}
