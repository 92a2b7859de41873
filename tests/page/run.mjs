// Answers requests {task, ...}, one per line, with the modules of the page in a folder: node run.mjs FOLDER

import { readFile } from "node:fs/promises";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const module = (name) => import(pathToFileURL(`${process.argv[2]}/${name}.js`));
const read = async (path) => new Uint8Array(await readFile(path));
const opened = new Map();

async function open(name, kind, path) {
    if (!opened.has(path)) opened.set(path, await (await module(name))[kind].open(path, read));
    return opened.get(path);
}

async function collected(events) {
    const found = [];
    for await (const event of events) found.push(event);
    return found;
}

const scored = (hypotheses) => hypotheses.map(({ tokens, score }) => [tokens, score]);
const numbers = (values) => values.map((value) => value ?? -Infinity); // JSON has no infinity

const TASKS = {
    /** A search over steps of candidates that do not depend on it. */
    async search({ longest, options, special, lines, steps }) {
        const [{ Search }, { LineRules }] = [await module("search"), await module("lines")];
        const search = new Search(longest, options, special, lines && new LineRules(...lines, options.beam));
        const settled = [];
        for (const { top, types, special } of steps) {
            const going = search.step({ top: numbers(top), types, special: numbers(special) });
            settled.push(...search.settled());
            if (!going) break;
        }
        return { hypotheses: scored(search.hypotheses()), settled };
    },

    /** Fields of ink, of a drawing as it is and as it is recognised. */
    async pen({ strokes }) {
        const { ink, enlarged } = await module("pen");
        return [ink(strokes), ink(enlarged(strokes))];
    },

    async pieces({ model, texts }) {
        const { Pieces } = await module("pieces");
        const pieces = new Pieces(await read(model));
        return texts.map((text) => pieces.encode(text));
    },

    async hypotheses({ path, source, options }) {
        return scored(await (await open("translator", "Translator", path)).search(source, options));
    },

    async translate({ path, texts, options }) {
        const events = await collected((await open("translator", "Translator", path)).stream(texts, options));
        return events.map((each) => (each.weights ? { ...each, weights: Array.from(each.weights) } : each));
    },

    /** The log-probability of each token of a translation. */
    async score({ path, source, target }) {
        const translator = await open("translator", "Translator", path);
        const { inputs, places } = await translator.inputs(source, 1);
        translator.decoder.start(1, 1, inputs, { allTypes: true });
        const found = [];
        for (const [n, token] of target.entries()) {
            const before = n === 0 ? translator.special.eos : target[n - 1];
            places?.advance([before], [0], translator.numbers);
            found.push((await translator.decoder.step([before], [0])).logProbs[token]);
        }
        return found;
    },

    async continue({ path, text, options, draws }) {
        const random = () => draws.shift();
        return collected((await open("language_model", "LanguageModel", path)).stream(text, { ...options, random }));
    },

    async classify({ path, values }) {
        return (await open("classifier", "Classifier", path)).predict(values);
    },

    async probe({ path, width }) {
        const { Folder, tensor } = await module("folder");
        const session = await (await Folder.open(path, "translation model", read)).session("probe.onnx");
        return Array.from((await session.run({ x: tensor(new Float32Array(width).fill(1), 1, width) })).y.data);
    },
};

for await (const line of createInterface({ input: process.stdin })) {
    let answer;
    try {
        const { task, ...request } = JSON.parse(line);
        answer = { found: await TASKS[task](request) };
    } catch (error) {
        answer = { error: error.message };
    }
    process.stdout.write(`${JSON.stringify(answer)}\n`);
}
