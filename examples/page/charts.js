// Figures as SVG: a line, and bars on a logarithmic axis.

const WIDTH = 420;
const HEIGHT = 150;
const LEFT = 44; // pixels for numbers
const BOTTOM = 22;
const BUCKETS = 60; // points of a line, each the mean of as many numbers

function svg(kind, attributes, text) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    return made;
}

function frame(height, label, parts) {
    const made = svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": label });
    made.append(...parts);
    return made;
}

/** Numbers against their places, 1, 2, ..., on an axis from 0. */
export function line(numbers, label) {
    const width = Math.ceil(numbers.length / BUCKETS);
    const means = [];
    for (let start = 0; start < numbers.length; start += width) {
        const part = numbers.slice(start, start + width);
        means.push({ place: start + part.length / 2, mean: part.reduce((sum, n) => sum + n, 0) / part.length });
    }
    const top = rounded(Math.max(...means.map(({ mean }) => mean)));
    const x = (place) => LEFT + (place / numbers.length) * (WIDTH - LEFT - 8);
    const y = (value) => HEIGHT - BOTTOM - (value / top) * (HEIGHT - BOTTOM - 10);
    const marks = [0, top / 2, top].flatMap((value) => [
        svg("line", { x1: LEFT, x2: WIDTH - 8, y1: y(value), y2: y(value) }),
        svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, `${value}`),
    ]);
    const points = means.map(({ place, mean }) => `${x(place).toFixed(1)},${y(mean).toFixed(1)}`).join(" ");
    const below = [
        svg("text", { x: LEFT, y: HEIGHT - 6 }, "1"),
        svg("text", { x: WIDTH - 8, y: HEIGHT - 6, "text-anchor": "end" }, numbers.length.toLocaleString("en")),
    ];
    return frame(HEIGHT, label, [...marks, svg("polyline", { points }), ...below]);
}

/** The next of 1, 2, 5, 10, ... */
function rounded(number) {
    const unit = 10 ** Math.floor(Math.log10(number));
    return [1, 2, 5, 10].map((factor) => Number((factor * unit).toPrecision(1))).find((value) => value >= number);
}

/** Rows {name, from, median, to} on a logarithmic axis; null stands for infinity. */
export function bars(rows, label) {
    const finite = rows.flatMap((row) => [row.from, row.to]).filter((value) => value !== null);
    const [first, last] = [Math.floor(Math.log10(Math.min(...finite))), Math.ceil(Math.log10(Math.max(...finite, 10)))];
    const left = 64;
    const x = (value) => {
        const share = value === null ? 1 : (Math.log10(value) - first) / Math.max(last - first, 1);
        return left + Math.min(share, 1) * (WIDTH - left - 24);
    };
    const bottom = 20 * rows.length + 6;
    const parts = [];
    for (let power = first; power <= last; power++) {
        const at = x(10 ** power);
        parts.push(svg("line", { x1: at, x2: at, y1: 0, y2: bottom }));
        const text = { x: at, y: bottom + 14, "text-anchor": "middle" };
        parts.push(svg("text", text, (10 ** power).toLocaleString("en", { maximumSignificantDigits: 1 })));
    }
    rows.forEach((row, n) => {
        const [from, to, middle, y] = [x(row.from), x(row.to), x(row.median), 20 * n + 5];
        parts.push(svg("text", { x: 0, y: y + 10 }, row.name));
        parts.push(svg("rect", { class: "bar", x: from, y, width: Math.max(to - from, 1), height: 12 }));
        parts.push(svg("line", { class: "median", x1: middle, x2: middle, y1: y, y2: y + 12 }));
    });
    return frame(bottom + 20, label, parts);
}
