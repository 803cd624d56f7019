// KV memory while one step is computed, in one place for all milestones: M1's rectangle of rows, M2's
// regions, and blocks from M3 on.

const CELL_GAP = 2;
const LEGENDS = {
  token: "A row for each request, all as wide as the longest. Point at a row.",
  region: "A region holds one request, however long it may become. Filled from the left: what is stored. Point at one, or go there with the arrow keys.",
  block: "A block has the colour of its request and is filled from below; a ring: shared. Point at one, or go there with the arrow keys.",
};

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
    const { run, at } = view;
    const [total, host] = [numShown(), run.host[at]];
    let cell = 44;
    while (cell > 5 && Math.ceil(total / Math.floor(width / cell)) * cell > 300) cell--;
    Object.assign(memory, { cell, columns: Math.max(1, Math.floor(width / cell)) });
    const height = Math.ceil(total / memory.columns) * cell;
    const hostHeight = host.length ? 26 + host.length * (Math.min(cell, 22) + 4) : 0;
    const context = prepare(canvas, width, height + hostHeight);
    const owned = drawOwned(context);
    if (cell >= 12) drawDetails(context, total);
    else drawFree(context, total, owned);
    if (memory.picked !== null) frame(context, memory.picked, "--cursor", cell >= 12 ? 3 : 2);
    if (host.length) drawHost(context, host, height, Math.min(cell, 22));
  }

  // Blocks beyond those that some step has used are folded away.
  function numShown() {
    const { total } = view.run.records[view.at].kv;
    return Math.min(total, Math.ceil(Math.max(1, view.run.numBlocks) / 8) * 8);
  }

  function placeOf(block) {
    const gap = memory.cell >= 12 ? CELL_GAP : memory.cell >= 7 ? 1 : 0.5;
    const x = (block % memory.columns) * memory.cell;
    const y = Math.floor(block / memory.columns) * memory.cell;
    return [x, y, memory.cell - gap];
  }

  // Pale, and solid as high as it is full; a part each for several owners. Straight from the block
  // tables: there may be thousands of blocks, and the cursor must not wait for them.
  function drawOwned(context) {
    const { run, at } = view;
    const holders = holdersAt(run, at);
    const [count, done] = [new Map(), new Map()];
    for (const [, table] of holders) for (const block of table) count.set(block, (count.get(block) || 0) + 1);
    for (const [name, table, tokens] of holders) {
      const strength = state.lit !== null && state.lit !== name ? 0.4 : 1;
      context.fillStyle = colorOf(run, name);
      table.forEach((block, index) => {
        if (block < 0) return; // given back
        const parts = Math.min(6, count.get(block));
        const part = done.get(block) || 0;
        if (part === parts) return;
        done.set(block, part + 1);
        const [x, y, s] = placeOf(block);
        const [left, w] = [x + (part * s) / parts, s / parts];
        const share = Math.max(0, Math.min(1, tokens / run.blockSize - index));
        const solid = share > 0 ? Math.max(1, s * share) : 0;
        if (share < 1) {
          context.globalAlpha = 0.28 * strength;
          context.fillRect(left, y, w, s - solid);
        }
        context.globalAlpha = strength;
        context.fillRect(left, y + s - solid, w, solid);
      });
    }
    context.globalAlpha = 1;
    return count;
  }

  // Small blocks: those that are free, and in the midst of them a mark if the content can be found.
  function drawFree(context, total, owned) {
    context.fillStyle = css("--grid");
    for (let block = 0; block < total; block++) {
      const [x, y, s] = placeOf(block);
      if (!owned.has(block)) context.fillRect(x, y, s, s);
    }
    context.fillStyle = css("--soft");
    for (const block of cachedAt(view.run, view.at)) {
      const [x, y, s] = placeOf(block);
      if (!owned.has(block)) context.fillRect(x + s / 3, y + s / 2, s / 3, s / 2);
    }
  }

  // Large blocks: a ring around what is shared, a name, a frame for who is lit up.
  function drawDetails(context, total) {
    const { owners, cached } = known();
    for (let block = 0; block < total; block++) {
      const [x, y, s] = placeOf(block);
      const names = owners.get(block);
      if (!names) {
        frame(context, block, "--line", 1);
        if (cached.has(block)) hatch(context, x + 1, y + 1, s - 2, s - 2, css("--soft"), -1, Math.max(3, s / 5));
        if (s >= 24) drawText(context, block, x + 5, y + 9, 9, "--soft", s - 9);
        continue;
      }
      if (names.length > 1) frame(context, block, "--text", 1.5);
      if (names.includes(state.lit)) frame(context, block, "--text", 3);
      if (s >= 24) drawText(context, block, x + 5, y + 9, 9, "--text", s - 9);
      if (s >= 34) drawText(context, names.length > 1 ? `×${names.length}` : short(names[0]), x + 5, y + s - 10, 10.5, "--text", s - 9);
    }
  }

  function frame(context, block, color, width) {
    const [x, y, s] = placeOf(block);
    context.strokeStyle = css(color);
    context.lineWidth = width;
    context.strokeRect(x + width / 2, y + width / 2, s - width, s - width);
  }

  // With a rim, since it stands on any colour.
  function drawText(context, text, x, y, size, color, width) {
    context.font = `600 ${size}px system-ui, sans-serif`;
    context.textBaseline = "middle";
    context.lineJoin = "round";
    context.lineWidth = 3;
    context.strokeStyle = css("--card");
    context.strokeText(text, x, y, width);
    context.fillStyle = css(color);
    context.fillText(text, x, y, width);
  }

  function drawHost(context, host, top, s) {
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.fillStyle = css("--soft");
    context.fillText(inLanguage("host memory (swapped out)"), 0, top + 13);
    host.forEach(([name, count], index) => {
      const y = top + 26 + index * (s + 4);
      context.fillStyle = css("--text");
      context.fillText(short(name), 0, y + s / 2);
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
    const { size, owners, fill } = known();
    return Array.from({ length: numShown() }, (_, block) => {
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
    const unit = (width - left - 2) / Math.max(...views.map(({ run }) => run.widest)); // one scale for two runs
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    bars.forEach((bar, index) => {
      const [y, h] = [index * height, height - (height > 12 ? 5 : 1)];
      context.fillStyle = css("--text");
      if (left) context.fillText(short(bar.label), 0, y + h / 2);
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
        if (bar.padding) drawWaste(context, left, y, bar.padding * unit, h);
      }
      const isLit = bar.name !== null && bar.name === state.lit;
      context.strokeStyle = isLit ? css("--text") : memory.picked === bar.block ? css("--cursor") : css("--line");
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
    if (block === null) return LEGENDS[view.run.records[view.at].kv.unit] + folded();
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

  function folded() {
    const { unit, total } = view.run.records[view.at].kv;
    const rest = unit === "token" ? 0 : total - numShown();
    return rest ? ` Not drawn: ${plural(rest, unit)} from ${total - rest} on, which no step has used.` : "";
  }

  const count = () => (known().unit === "block" ? numShown() : memory.bars.length);
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
