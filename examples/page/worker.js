// Runs models away from the page, which so stays responsive.
//
// Requests {id, kind, path, input, options} are answered by {id, event}, any number of them, and then by {id, ended} or
// {id, error}. {stop: id} stops a request, which then has not ended.

import { Classifier } from "./classifier.js";
import { LanguageModel } from "./language_model.js";
import { Translator } from "./translator.js";

const KINDS = { "translation model": Translator, "language model": LanguageModel, classifier: Classifier };
const LONGEST = 50; // milliseconds of work before messages are read
const models = new Map();
const stopped = new Set();
let last = Promise.resolve(); // a model serves one request at a time

onmessage = ({ data }) => {
    if (data.stop !== undefined) stopped.add(data.stop);
    else last = last.then(() => answer(data));
};

async function answer({ id, kind, path, input, options }) {
    try {
        await new Promise((resolve) => setTimeout(resolve)); // it may be stopped already
        if (stopped.has(id)) {
            postMessage({ id, ended: false });
            return;
        }
        if (!models.has(path)) models.set(path, await KINDS[kind].open(path));
        let since = performance.now();
        for await (const event of models.get(path).stream(input, options)) {
            postMessage({ id, event });
            if (performance.now() - since > LONGEST) {
                await new Promise((resolve) => setTimeout(resolve));
                since = performance.now();
            }
            if (stopped.has(id)) break;
        }
        postMessage({ id, ended: !stopped.has(id) });
    } catch (error) {
        postMessage({ id, error: error.message });
    }
}
