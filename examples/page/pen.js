// A drawing as strokes of a pen, each an array of points {x, y}, and as 8 x 8 fields of ink.

export const SIDE = 8;
export const MOST = 255; // a black field
const PEN = 0.95; // fields from the pen at which it leaves no more ink
const BOX = { x: 6.2, y: 6.6 }; // fields that the strokes of a digit of the training reach across, at most

/** Ink on the fields near the way of the pen: the nearer, the more. */
export function ink(strokes) {
    const fields = Array(SIDE * SIDE).fill(0);
    for (const points of strokes)
        points.forEach((to, number) => {
            const from = points[Math.max(number - 1, 0)];
            const steps = Math.ceil(Math.hypot(to.x - from.x, to.y - from.y) * 4) + 1;
            for (let step = 1; step <= steps; step++) {
                const [x, y] = ["x", "y"].map((axis) => from[axis] + ((to[axis] - from[axis]) * step) / steps);
                fields.forEach((before, n) => {
                    const away = Math.hypot((n % SIDE) + 0.5 - x, Math.floor(n / SIDE) + 0.5 - y);
                    fields[n] = Math.max(before, Math.round(MOST * Math.min(1, Math.max(0, 1.5 * (PEN - away)))));
                });
            }
        });
    return fields;
}

/** The strokes in the middle, as large as fits into BOX; a dot stays a dot. */
export function enlarged(strokes) {
    const [x, y] = ["x", "y"].map((axis) => {
        const along = strokes.flat().map((point) => point[axis]);
        const [least, most] = [Math.min(...along), Math.max(...along)];
        return { middle: (least + most) / 2, room: BOX[axis] / Math.max(most - least, 1) };
    });
    const scale = Math.min(x.room, y.room);
    const moved = (place, { middle }) => (place - middle) * scale + SIDE / 2;
    return strokes.map((points) => points.map((point) => ({ x: moved(point.x, x), y: moved(point.y, y) })));
}
