// Finds the models of the server, and gives each panel those of its kind.

import { ABOUT } from "./about.js";
import { Draw } from "./draw.js";
import { Translate } from "./translate.js";
import { Write } from "./write.js";

const PANELS = {
    "translation model": ["translate", Translate],
    "language model": ["write", Write],
    classifier: ["draw", Draw],
};

const names = await (await fetch("models/")).json();
const known = Object.keys(ABOUT); // first, and in this order
names.sort((one, other) => (known.indexOf(one) + 1 || Infinity) - (known.indexOf(other) + 1 || Infinity) || 0);
const configs = await Promise.all(
    names.map(async (name) => {
        try {
            return [name, await (await fetch(`models/${encodeURIComponent(name)}/config.json`)).json()];
        } catch {
            return [name, {}]; // damaged: of no kind
        }
    }),
);
for (const [kind, [place, Panel]] of Object.entries(PANELS)) {
    const models = configs.filter(([, config]) => config?.kind === kind);
    new Panel(document.getElementById(place), Object.fromEntries(models));
}
document.body.dataset.ready = "yes";
