// What the panels share: the choice of a model and of examples, the state of a request, and errors.

import { about } from "./about.js";
import { Runner } from "./runner.js";

export class Panel {
    /** `models` are the folders of this kind, by name their config.json. */
    constructor(section, kind, models) {
        this.models = models;
        this.number = 0; // of the newest request
        this.find = (selector) => section.querySelector(selector);
        this.form = this.find("form");
        this.form.prepend(document.getElementById("choice").content.cloneNode(true));
        this.status = this.find(".status");
        const names = Object.keys(models);
        if (names.length === 0) {
            this.form.hidden = true;
            this.find(".missing").hidden = false;
            this.find(".missing").textContent = `There is no ${kind} in the folder of models; export one there.`;
            return;
        }
        this.runner = new Runner(kind);
        this.form.model.append(...names.map((name) => new Option(about(name).title, name)));
        this.form.model.closest("label").hidden = names.length === 1;
        this.form.model.onchange = () => this.chosen();
        this.form.onsubmit = (event) => {
            event.preventDefault();
            this.run();
        };
        this.form.onkeydown = (event) => {
            if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.form.requestSubmit();
        };
        if (this.form.stop) this.form.stop.onclick = () => this.runner.stop();
        this.chosen();
    }

    get name() {
        return this.form.model.value;
    }

    /** Shows what belongs to the chosen model. */
    chosen() {
        const buttons = about(this.name).examples.map((example) => {
            const button = document.createElement("button");
            Object.assign(button, { type: "button", textContent: example.title });
            button.onclick = async () => this.example(example.text ?? (await (await fetch(example.file)).text()));
            return button;
        });
        this.find(".examples").replaceChildren(...(buttons.length > 0 ? ["Examples:", ...buttons] : []));
    }

    /** Runs the model; gives whether it came to its end, or another request to its place. Errors appear in this panel. */
    async request(input, options, onEvent) {
        const number = ++this.number;
        this.busy(true);
        this.say("Loading the model\u2026");
        try {
            const ended = await this.runner.run(`models/${encodeURIComponent(this.name)}`, input, options, onEvent);
            return ended || number !== this.number;
        } catch (error) {
            if (number === this.number) this.say(error.message, true);
            return number !== this.number;
        } finally {
            if (number === this.number) this.busy(false);
        }
    }

    /** Ends a request that nobody waits for any more. */
    cancel() {
        this.number++;
        this.runner.stop();
        this.busy(false);
    }

    busy(is) {
        this.form.setAttribute("aria-busy", is);
        if (this.form.stop) this.form.stop.disabled = !is;
    }

    say(text, isError = false) {
        this.status.textContent = text;
        this.status.classList.toggle("error", isError);
    }
}
