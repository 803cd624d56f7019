// KV memory while one step is computed, in one place for all milestones: M1's rectangle of rows, M2's
// regions, and blocks from M3 on.

const CELL_GAP = 2;
const LEGENDS = {
  token: "A row for each request, all as wide as the longest. Hatched: computed for nobody. Point at a row.",
  region: "A region holds one request, however long it may become. Filled from the left: what it has stored. Point at one, or go there with the arrow keys.",
  block: "Filled from below: how full it is. A ring: shared. Point at it, or go there with the arrow keys.",
};

// A colour as the number that stands for a pixel: alpha, blue, green, red.
function numberOf(color) {
  const hex = /^#(..)(..)(..)$/.exec(color);
  const [r, g, b] = hex ? hex.slice(1).map((part) => parseInt(part, 16)) : color.match(/\d+/g).map(Number);
  return ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
}

function mixed(one, other, share = 0.72) {
  let number = 0;
  for (const shift of [0, 8, 16]) {
    const part = ((one >>> shift) & 255) * (1 - share) + ((other >>> shift) & 255) * share;
    number |= Math.round(part) << shift;
  }
  return ((255 << 24) | number) >>> 0;
}

function makeMemory(view) {
  const canvas = view.box.querySelector(".blocks canvas");
  const tip = view.box.querySelector(".tip");
  // What is known of each block, if somebody asks.
  const known = () => (memory.state ||= memoryAt(view.run, view.at));
  const memory = { width: 0, cell: 0, columns: 1, state: null, picked: null };

  memory.draw = () => {
    const { run, at } = view;
    if (!run.records.length) return;
    memory.state = null;
    const { unit } = run.records[at].kv;
    memory.width ||= canvas.parentElement.clientWidth; // to ask anew each time would cost a layout
    const { width } = memory;
    if (unit === "block") drawBlocks(width);
    else drawBars(width, unit === "token" ? rectangle() : regions());
    describe(memory.picked);
  };

  // --- blocks ---------------------------------------------------------------------------------

  function drawBlocks(width) {
    const [{ total }, host] = [view.run.records[view.at].kv, view.run.host[view.at]];
    let cell = 44;
    while (cell > 5 && Math.ceil(total / Math.floor(width / cell)) * cell > 300) cell--;
    Object.assign(memory, { cell, columns: Math.max(1, Math.floor(width / cell)) });
    const height = Math.ceil(total / memory.columns) * cell;
    const hostHeight = host.length ? 26 + host.length * (Math.min(cell, 22) + 4) : 0;
    const context = prepare(canvas, width, height + hostHeight);
    if (cell < 12) drawSmall(context, width, height);
    else for (let block = 0; block < total; block++) drawBlock(context, block);
    if (host.length) drawHost(context, host, height, Math.min(cell, 22));
  }

  function placeOf(block) {
    const gap = memory.cell >= 12 ? CELL_GAP : memory.cell >= 7 ? 1 : 0.5;
    const x = (block % memory.columns) * memory.cell;
    const y = Math.floor(block / memory.columns) * memory.cell;
    return [x, y, memory.cell - gap];
  }

  function drawBlock(context, block) {
    const { owners, fill, size, cached } = known();
    const [x, y, s] = placeOf(block);
    const names = owners.get(block);
    context.lineWidth = 1;
    if (!names) {
      context.strokeStyle = css("--line");
      if (s > 5) context.strokeRect(x + 0.5, y + 0.5, s - 1, s - 1);
      else {
        context.fillStyle = css("--grid");
        context.fillRect(x, y, s, s);
      }
      if (cached.has(block)) hatch(context, x + 1, y + 1, s - 2, s - 2, css("--soft"), 1, Math.max(3, s / 5));
    } else {
      drawOwned(context, x, y, s, names, size ? fill.get(block) / size : 1);
      if (s >= 30) drawLabel(context, x, y, s, names);
    }
    const isLit = names && state.lit !== null && names.includes(state.lit);
    if (isLit || memory.picked === block) {
      context.strokeStyle = css(isLit ? "--text" : "--accent");
      context.lineWidth = s >= 12 ? 3 : 2;
      context.strokeRect(x + 1, y + 1, s - 2, s - 2);
    } else if (names && state.lit !== null) {
      context.fillStyle = css("--card");
      context.globalAlpha = 0.6;
      context.fillRect(x, y, s, s);
      context.globalAlpha = 1;
    }
  }

  // Thousands of blocks are written as pixels, straight from the block tables: drawing each of them
  // would take longer than a cursor may.
  function drawSmall(context, width, height) {
    const { run, at } = view;
    const { total } = run.records[at].kv;
    const scale = canvas.width / width;
    const image = context.createImageData(canvas.width, Math.round(height * scale));
    const pixels = new Uint32Array(image.data.buffer);
    const stride = image.width;
    const step = memory.cell * scale;
    const side = Math.max(1, Math.round(step - scale));
    // A part of a block: the `index`-th of `parts` columns, from `top` down.
    const paint = (color, block, index = 0, parts = 1, top = 0) => {
      const left = Math.round((block % memory.columns) * step) + Math.floor((index * side) / parts);
      const right = left + Math.ceil(side / parts);
      const first = Math.round(Math.floor(block / memory.columns) * step);
      for (let line = first + top; line < first + side; line++)
        for (let x = line * stride + left; x < line * stride + right; x++) pixels[x] = color;
    };
    const [empty, soft, card] = ["--grid", "--soft", "--card"].map((name) => numberOf(css(name)));
    const holders = holdersAt(run, at);
    const count = new Uint8Array(total);
    for (const [, table] of holders) for (const block of table) count[block] = Math.min(4, count[block] + 1);
    for (let block = 0; block < total; block++) if (!count[block]) paint(empty, block);
    for (const block of cachedAt(run, at)) if (!count[block]) paint(soft, block, 1, 3, Math.floor(side / 2));
    const done = new Uint8Array(total);
    const isDimmed = state.lit !== null || memory.picked !== null;
    for (const [name, table, tokens] of holders) {
      const color = numberOf(colorOf(run, name));
      const dim = isDimmed && name !== state.lit ? mixed(color, card) : color;
      table.forEach((block, index) => {
        if (done[block] >= count[block]) return;
        const stored = Math.max(0, Math.min(1, tokens / run.blockSize - index));
        if (stored < 1 && !done[block]) paint(empty, block);
        const top = Math.round(side * (1 - stored));
        paint(block === memory.picked ? color : dim, block, done[block]++, count[block], top);
      });
    }
    context.putImageData(image, 0, 0);
  }

  // As high as it is full; a part each for several owners, and a ring around what is shared.
  function drawOwned(context, x, y, s, names, share) {
    const part = s / names.length;
    names.slice(0, 6).forEach((name, index) => {
      const w = names.length > 6 ? s / 6 : part;
      context.fillStyle = colorOf(view.run, name);
      context.globalAlpha = 0.28;
      context.fillRect(x + index * w, y, w, s);
      context.globalAlpha = 1;
      const height = Math.max(share > 0 ? 1 : 0, s * share);
      context.fillRect(x + index * w, y + s - height, w, height);
    });
    if (names.length > 1 && s > 6) {
      context.strokeStyle = css("--text");
      context.lineWidth = 1.5;
      context.strokeRect(x + 1, y + 1, s - 2, s - 2);
    }
  }

  function drawLabel(context, x, y, s, names) {
    const label = names.length > 1 ? `×${names.length}` : shorten(names[0], 5);
    context.font = "600 10.5px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "middle";
    const w = Math.min(s - 4, context.measureText(label).width + 5);
    context.fillStyle = css("--card");
    context.fillRect(x + s / 2 - w / 2, y + s / 2 - 7, w, 14);
    context.fillStyle = css("--text");
    context.fillText(label, x + s / 2, y + s / 2 + 0.5, s - 6);
    context.textAlign = "left";
  }

  function drawHost(context, host, top, s) {
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.fillStyle = css("--soft");
    context.fillText("host memory (swapped out)", 0, top + 13);
    host.forEach(([name, count], index) => {
      const y = top + 26 + index * (s + 4);
      context.fillStyle = css("--text");
      context.fillText(shorten(name, 8), 0, y + s / 2);
      for (let block = 0; block < count; block++) {
        const x = 64 + block * s;
        hatch(context, x, y, s - 2, s - 2, colorOf(view.run, name), -1, 3);
        context.strokeStyle = colorOf(view.run, name);
        context.strokeRect(x + 0.5, y + 0.5, s - 3, s - 3);
      }
    });
  }

  // --- bars: one for each region, or each row of a static batch -----------------------------------

  function regions() {
    const { total, size, owners, fill } = known();
    return Array.from({ length: total }, (_, block) => {
      const name = owners.get(block)?.[0] ?? null;
      return { block, name, label: `region ${block}`, stored: fill.get(block) || 0, most: size, padding: 0 };
    });
  }

  function rectangle() {
    const { rows, width } = known();
    return rows.map((row, block) => ({
      block,
      name: row.request_id,
      label: row.request_id,
      stored: row.phase === "padding" ? 0 : rowEnd(row),
      most: width,
      padding: row.phase === "padding" ? width : width - rowEnd(row),
    }));
  }

  function drawBars(width, bars) {
    const height = Math.max(8, Math.min(30, Math.floor(320 / Math.max(1, bars.length))));
    Object.assign(memory, { cell: height, columns: 1, bars });
    const context = prepare(canvas, width, Math.max(30, bars.length * height));
    const left = height >= 12 ? 66 : 0;
    const longest = Math.max(1, ...bars.map((bar) => bar.most));
    const unit = (width - left - 2) / longest;
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    bars.forEach((bar, index) => {
      const [y, h] = [index * height, height - (height > 12 ? 5 : 1)];
      context.fillStyle = css("--text");
      if (left) context.fillText(shorten(bar.label, 10), 0, y + h / 2);
      const color = bar.name === null ? css("--line") : colorOf(view.run, bar.name);
      const w = Math.max(1, bar.most * unit);
      if (bar.name !== null) {
        context.fillStyle = color;
        context.globalAlpha = 0.2;
        context.fillRect(left, y, w, h);
        context.globalAlpha = 1;
        // M1 pads on the left, so that every row ends in the same column.
        const x = left + (known().unit === "token" ? (bar.most - bar.stored) * unit : 0);
        context.fillRect(x, y, bar.stored * unit, h);
        if (bar.padding) hatch(context, left, y, bar.padding * unit, h, css("--soft"), -1, 5);
      }
      const isLit = bar.name !== null && bar.name === state.lit;
      context.strokeStyle = isLit ? css("--text") : memory.picked === bar.block ? css("--accent") : css("--line");
      context.lineWidth = isLit || memory.picked === bar.block ? 2.5 : 1;
      context.strokeRect(left + 0.5, y + 0.5, w - 1, h - 1);
    });
  }

  // --- what a block says about itself ------------------------------------------------------------

  function describe(block) {
    const text = aboutBlock(block);
    if (tip.textContent !== text) tip.textContent = text;
  }

  function aboutBlock(block) {
    if (block === null) return LEGENDS[view.run.records[view.at].kv.unit] + (view.run.hasCache ? " Hatched: free, but its content can be found." : "");
    const { unit, owners, fill, size, cached } = known();
    if (unit === "token") {
      const bar = memory.bars[block];
      return bar ? `${bar.name}: ${bar.stored} tokens stored of ${bar.most} reserved` : "";
    }
    const names = owners.get(block);
    if (!names) return `${unit} ${block}: free${cached.has(block) ? ", still holds the KV of a prefix" : ""}`;
    const more = names.length > 8 ? ` and ${names.length - 8} more` : "";
    return `${unit} ${block}: ${fill.get(block)} of ${size} tokens, owned by ${names.slice(0, 8).join(", ")}${more}`;
  }

  function pick(block) {
    if (block === memory.picked) return;
    memory.picked = block;
    const { unit, owners } = known();
    const name = block === null ? null : unit === "token" ? memory.bars[block]?.name : owners.get(block)?.[0];
    light(name ?? null, true);
  }

  const count = () => (known().unit === "block" ? known().total : memory.bars.length);
  canvas.addEventListener("pointermove", ({ offsetX, offsetY }) => {
    const column = memory.columns > 1 ? Math.floor(offsetX / memory.cell) : 0;
    const block = Math.floor(offsetY / memory.cell) * memory.columns + column;
    pick(column < memory.columns && block < count() ? block : null);
  });
  canvas.addEventListener("pointerleave", () => pick(null));
  canvas.addEventListener("blur", () => pick(null));
  canvas.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -memory.columns, ArrowDown: memory.columns };
    if (!(event.key in moves)) return;
    event.preventDefault();
    event.stopPropagation(); // the cursor stays
    const block = memory.picked === null ? 0 : memory.picked + moves[event.key];
    if (block >= 0 && block < count()) pick(block);
  });
  return memory;
}
