// The panel that continues a text, with what its layers remember.

import { about } from "./about.js";
import { bars, line } from "./charts.js";
import { Panel } from "./panel.js";

const REDRAWN = 250; // milliseconds between two drawings of the speed

export class Write extends Panel {
    constructor(section, models) {
        super(section, "language model", models);
    }

    chosen() {
        super.chosen();
        this.form.start.lang = this.find(".written").lang = about(this.name).source;
        const lives = this.models[this.name].half_lives;
        this.find(".lives").hidden = lives === undefined;
        if (lives === undefined) return;
        const quantiles = (row) => ({ from: row["10%"], median: row.median, to: row["90%"] });
        const rows = lives.map((row, n) => ({ name: `layer ${n + 1}`, ...quantiles(row) }));
        this.find(".lives .chart").replaceChildren(bars(rows, "Half-lives of each layer, in tokens"));
    }

    example(text) {
        this.form.start.value = text;
        this.form.requestSubmit(); // after a check of the numbers
    }

    async run() {
        const start = this.form.start.value;
        const written = this.find(".written");
        const given = Object.assign(document.createElement("b"), { textContent: start });
        const found = document.createTextNode("");
        written.replaceChildren(given, found);
        written.hidden = false;
        this.times = [];
        this.redrawn = 0;
        this.find(".speed").hidden = true;
        const options = { maxTokens: this.form.tokens.valueAsNumber, temperature: this.form.temperature.valueAsNumber };
        const ended = await this.request(start, options, ({ part, milliseconds }) => {
            if (part !== undefined) {
                found.data += part;
                written.scrollTop = written.scrollHeight;
                return;
            }
            this.times.push(milliseconds);
            if (performance.now() - this.redrawn > REDRAWN) this.progress();
        });
        if (this.times.length > 0) this.progress();
        if (!ended && !this.status.classList.contains("error")) this.say(`${this.status.textContent}; stopped`);
    }

    progress() {
        this.redrawn = performance.now();
        const mean = this.times.reduce((sum, time) => sum + time) / this.times.length;
        const each = `${mean.toFixed(1)} ms per token`;
        this.say(`${this.times.length.toLocaleString("en")} tokens, ${each}`);
        this.find(".speed").hidden = false;
        this.find(".speed .chart").replaceChildren(line(this.times, `Time by position: ${each} in the mean`));
    }
}
