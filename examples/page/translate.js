// The panel that translates lines: each beside its source, and which words of it a word looks at.

import { about } from "./about.js";
import { line } from "./charts.js";
import { Panel } from "./panel.js";

const SHOWN = 0.2; // of the largest weight: what marks a word
const LEAST = 0.03; // weights that are drawn
const LEAST_CELL = 13; // pixels of a field of the picture from which words fit
const REDRAWN = 250; // milliseconds between two drawings of the speed

export class Translate extends Panel {
    constructor(section, models) {
        super(section, "translation model", models);
        this.lines = this.find(".lines");
        this.lines.onpointerover = (event) => this.look(event.target);
        this.lines.addEventListener("focusin", (event) => this.look(event.target));
        this.lines.onkeydown = (event) => this.walk(event);
        matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
        addEventListener("resize", () => this.draw());
    }

    chosen() {
        super.chosen();
        this.form.source.lang = about(this.name).source;
    }

    example(text) {
        this.form.source.value = text.trimEnd();
        this.run();
    }

    async run() {
        const texts = this.form.source.value.split("\n").map((text) => text.replace("\r", ""));
        this.times = [];
        this.picture = null;
        this.pictures = new Map(); // by line
        this.finished = 0;
        const blank = texts.filter((text) => text.trim() === "").length;
        this.count = texts.length - blank;
        this.rows = texts.map((text) => this.row(text));
        this.lines.replaceChildren(...this.rows);
        this.find(".looks").hidden = this.find(".speed").hidden = true;
        this.redrawn = 0;
        if (this.count === 0) {
            this.cancel();
            this.say("Type a text first.");
            return;
        }
        const ended = await this.request(texts, {}, (event) => this.received(event));
        if (this.times.length > 0) this.progress();
        if (!ended && !this.status.classList.contains("error")) this.say(`${this.status.textContent}; stopped`);
    }

    row(text) {
        const [row, source, translation] = Array.from("123", () => document.createElement("div"));
        Object.assign(source, { textContent: text, lang: about(this.name).source });
        Object.assign(translation, { className: "translation", lang: about(this.name).target });
        row.append(source, translation);
        return row;
    }

    received(event) {
        if (event.line !== undefined) {
            this.rows[event.line].lastChild.textContent = event.text;
            if (event.text !== "") this.finished += 1;
        } else if (event.weights !== undefined) {
            this.shown(event);
        } else {
            this.times.push(event.milliseconds);
            if (performance.now() - this.redrawn > REDRAWN) this.progress();
        }
    }

    progress() {
        this.redrawn = performance.now();
        const mean = this.times.reduce((sum, time) => sum + time) / this.times.length;
        const tokens = this.times.length.toLocaleString("en");
        const each = `${mean.toFixed(1)} ms per token`;
        if (!this.status.classList.contains("error")) {
            this.say(`${this.finished} of ${this.count} lines, ${tokens} tokens, ${each}`);
        }
        this.find(".speed").hidden = false;
        this.find(".speed .chart").replaceChildren(line(this.times, `Time by position: ${each} in the mean`));
    }

    // ---------------------------------------------------------------------------------------- where a word looks

    /** Makes the words of some lines and of their translations elements, which know each other. */
    shown(picture) {
        const places = (words, side) =>
            words.map(({ text, line }) => {
                const word = Object.assign(document.createElement("span"), { textContent: text });
                const cell = this.rows[picture.lines[line]][side];
                if (!cell.dataset.words) cell.replaceChildren();
                else if (text !== "") cell.append(" ");
                cell.dataset.words = "yes";
                cell.append(word);
                return word;
            });
        picture.from = places(picture.source, "firstChild");
        picture.to = places(picture.target, "lastChild");
        picture.to.forEach((word, number) => {
            word.tabIndex = -1;
            this.pictures.set(word, { picture, number });
        });
        if (this.picture === null) {
            picture.to[0].tabIndex = 0; // the words are one stop of the Tab key; arrow keys move between them
            this.picture = picture;
            this.draw();
        }
    }

    /** Marks the words that a word of the translation looks at. */
    look(word) {
        const found = this.pictures?.get(word);
        if (found === undefined) return;
        const { picture, number } = found;
        for (const each of this.lines.querySelectorAll(".chosen")) each.classList.remove("chosen");
        for (const each of this.marked ?? []) each.removeAttribute("style");
        word.classList.add("chosen");
        const weights = picture.weights.subarray(number * picture.from.length, (number + 1) * picture.from.length);
        const most = Math.max(...weights);
        const mark = getComputedStyle(document.body).getPropertyValue("--mark");
        this.marked = picture.from.filter((_, n) => weights[n] > SHOWN * most);
        picture.from.forEach((each, n) => {
            const share = weights[n] / most;
            if (share > SHOWN) each.style.backgroundColor = `rgba(${mark}, ${share / 2})`;
        });
        if (picture !== this.picture) {
            this.picture = picture;
            this.draw();
        }
    }

    walk(event) {
        const words = Array.from(this.pictures?.keys() ?? []);
        const place = words.indexOf(document.activeElement);
        const next = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: words.length - 1 }[event.key];
        if (place < 0 || words[next] === undefined) return;
        event.preventDefault();
        words[place].tabIndex = -1;
        words[next].tabIndex = 0;
        words[next].focus();
    }

    /** The picture: target words from top to bottom, source words from left to right. */
    draw() {
        if (!this.picture) return;
        const { source, target, weights } = this.picture;
        const figure = this.find(".looks");
        figure.hidden = false;
        const canvas = figure.querySelector("canvas");
        const available = figure.clientWidth;
        const named = Math.max(...[...source, ...target].map(({ text }) => text.length)) * 7 + 8;
        const cell = (available - named) / source.length;
        const labels = cell >= LEAST_CELL;
        const edge = labels ? named : 0;
        const size = Math.min(labels ? cell : available / source.length, 26);
        const [width, height] = [edge + size * source.length, edge + size * target.length];
        const scale = devicePixelRatio;
        Object.assign(canvas, { width: Math.ceil(width * scale), height: Math.ceil(height * scale) });
        canvas.style.width = `${width}px`;
        const pen = canvas.getContext("2d");
        const style = getComputedStyle(document.body);
        const [mark, rule, text] = ["--mark", "--line", "--text"].map((name) => style.getPropertyValue(name));
        pen.scale(scale, scale);
        const least = labels ? 0 : 0.3; // small fields need more colour
        weights.forEach((weight, n) => {
            if (weight < LEAST) return;
            pen.fillStyle = `rgba(${mark}, ${Math.min(1, least + 1.2 * weight)})`;
            const [column, row] = [n % source.length, Math.floor(n / source.length)];
            pen.fillRect(edge + column * size, edge + row * size, Math.max(size, 1.5), Math.max(size, 1.5));
        });
        pen.fillStyle = rule;
        for (const place of starts(source)) pen.fillRect(edge + place * size, edge, 1, height - edge);
        for (const place of starts(target)) pen.fillRect(edge, edge + place * size, width - edge, 1);
        if (!labels) return;
        pen.fillStyle = text;
        pen.font = `12px ${style.fontFamily}`;
        pen.textAlign = "right";
        target.forEach(({ text }, n) => pen.fillText(text, edge - 5, edge + (n + 0.5) * size + 4));
        source.forEach(({ text }, n) => {
            pen.save();
            pen.translate(edge + (n + 0.5) * size + 4, edge - 5);
            pen.rotate(-Math.PI / 2);
            pen.textAlign = "left";
            pen.fillText(text, 0, 0);
            pen.restore();
        });
    }
}

/** The places of the words that begin lines, and the end. */
function starts(words) {
    return Array.from(words.keys()).filter((n) => n === 0 || words[n].line !== words[n - 1].line).concat(words.length);
}
