// The panel that recognises a digit of 8 x 8 fields, drawn with the pointer or the keyboard.

import { Panel } from "./panel.js";
import { enlarged, ink, MOST, SIDE } from "./pen.js";

const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

export class Draw extends Panel {
    constructor(section, models) {
        super(section, "classifier", models);
        if (this.runner === undefined) return;
        this.canvas = this.find("canvas");
        this.cursor = [3, 3]; // of the keyboard
        this.clear();
        this.form.clear.onclick = () => this.clear();
        this.canvas.onpointerdown = (event) => {
            this.canvas.setPointerCapture(event.pointerId);
            this.strokes.push([]);
            this.stroke(event);
        };
        this.canvas.onpointermove = (event) => {
            if (this.canvas.hasPointerCapture(event.pointerId)) this.stroke(event);
        };
        this.canvas.onkeydown = (event) => this.pressed(event);
        this.canvas.onfocus = this.canvas.onblur = () => this.show();
        matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.show());
    }

    chosen() {
        super.chosen();
        const labels = this.models[this.name].classes;
        this.meters = labels.map((label) => {
            const row = document.createElement("li");
            const meter = document.createElement("meter");
            meter.ariaLabel = `probability of ${label}`;
            const percent = document.createElement("span");
            row.append(Object.assign(document.createElement("span"), { textContent: label }), meter, percent);
            return { label, row, meter, percent };
        });
        this.find(".classes").replaceChildren(...this.meters.map(({ row }) => row));
    }

    example(drawn) {
        this.strokes = [];
        this.fields = Array.from(drawn.replaceAll(" ", ""), (sign) => (sign === "#" ? MOST : 0));
        this.run();
    }

    clear() {
        this.fields = Array(SIDE * SIDE).fill(0);
        this.strokes = []; // of the pen: the points of each
        this.show();
        this.cancel();
        this.say("");
        for (const { meter, percent, row } of this.meters) {
            meter.value = 0;
            percent.textContent = "";
            row.classList.remove("best");
        }
    }

    async run(fields = this.fields) {
        this.show();
        await this.request(fields, {}, ({ probabilities }) => {
            const best = Object.keys(probabilities).reduce((a, b) => (probabilities[b] > probabilities[a] ? b : a));
            for (const { label, row, meter, percent } of this.meters) {
                meter.value = probabilities[label];
                percent.textContent = `${(100 * probabilities[label]).toFixed(0)}%`;
                row.classList.toggle("best", label === best);
            }
            this.say(`It looks like ${best}, with a probability of ${(100 * probabilities[best]).toFixed(0)}%.`);
        });
    }

    // ---------------------------------------------------------------------------------------- drawing

    /** The drawing is shown where it is, and recognised as large as the digits of the training. */
    stroke(event) {
        const size = this.canvas.clientWidth / SIDE;
        this.strokes.at(-1).push({ x: event.offsetX / size, y: event.offsetY / size });
        this.fields = ink(this.strokes);
        this.run(ink(enlarged(this.strokes)));
    }

    pressed(event) {
        const move = ARROWS[event.key];
        if (move !== undefined) {
            this.cursor = this.cursor.map((place, axis) => Math.min(Math.max(place + move[axis], 0), SIDE - 1));
            this.show();
        } else if (event.key === " ") {
            const place = this.cursor[1] * SIDE + this.cursor[0];
            this.fields = this.fields.map((ink, n) => (n === place ? (ink > 0 ? 0 : MOST) : ink));
            this.strokes = [];
            this.run();
        } else {
            return;
        }
        event.preventDefault();
    }

    show() {
        const size = 32; // of a field
        Object.assign(this.canvas, { width: SIDE * size, height: SIDE * size });
        const pen = this.canvas.getContext("2d");
        const style = getComputedStyle(document.body);
        const [text, rule, accent] = ["--text", "--line", "--accent"].map((name) => style.getPropertyValue(name));
        this.fields.forEach((ink, n) => {
            const [x, y] = [(n % SIDE) * size, Math.floor(n / SIDE) * size];
            pen.globalAlpha = ink / MOST;
            pen.fillStyle = text;
            pen.fillRect(x, y, size, size);
            pen.globalAlpha = 1;
            pen.strokeStyle = rule;
            pen.strokeRect(x + 0.5, y + 0.5, size, size);
        });
        if (document.activeElement !== this.canvas) return;
        pen.strokeStyle = accent;
        pen.lineWidth = 3;
        pen.strokeRect(this.cursor[0] * size + 2, this.cursor[1] * size + 2, size - 4, size - 4);
    }
}
