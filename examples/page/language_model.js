// Texts that continue others.

import { Decoder } from "./decoder.js";
import { Folder, Integers, shapes, tensor } from "./folder.js";
import { Types, endsInBlank, segmenter, strippedAtStart } from "./text.js";

const PIECE = 1024; // tokens that are read at once
const NEAR = 8; // tokens before a continuation that tell how its text joins theirs

/** The graph that reads pieces of a text. */
class Reader {
    constructor(session) {
        this.session = session;
        this.inputs = shapes(session.inputMetadata);
        const layers = session.inputNames.filter((name) => name.startsWith("ema")).length;
        this.layers = Array.from({ length: layers }, (_, layer) => layer);
    }

    /** Before the first token: the states of the EMAs, and the keys and values of the open chunk. */
    start() {
        const empty = (name) => tensor(new Float32Array(), 1, 0, this.inputs[name][2]);
        const ema = this.layers.map((layer) => {
            const [n, dim] = this.inputs[`ema${layer}`];
            return tensor(new Float32Array(n * dim), n, dim);
        });
        return {
            position: 0,
            ema,
            keys: this.layers.map((layer) => empty(`keys${layer}`)),
            values: this.layers.map((layer) => empty(`values${layer}`)),
        };
    }

    /** The state after tokens that follow a state. */
    async read(state, tokens) {
        for (let start = 0; start < tokens.length; start += PIECE) {
            const piece = tokens.slice(start, start + PIECE);
            const one = tensor(Integers.of(0), 1); // ONNX Runtime fails at products of no rows in 8 bits
            const inputs = { tokens: tensor(Integers.of(...piece), 1, piece.length), wanted: one, targets: one };
            const names = [];
            for (const kind of ["ema", "keys", "values"]) {
                for (const layer of this.layers) {
                    inputs[`${kind}${layer}`] = state[kind][layer];
                    names.push(`new_${kind}${layer}`);
                }
            }
            const after = await this.session.run(inputs, names);
            const part = (kind) => this.layers.map((layer) => after[`new_${kind}${layer}`]);
            const position = state.position + piece.length;
            state = { position, ema: part("ema"), keys: part("keys"), values: part("values") };
        }
        return state;
    }
}

export class LanguageModel {
    static async open(path, read) {
        const folder = await Folder.open(path, "language model", read);
        const made = new LanguageModel();
        made.config = folder.config;
        made.special = folder.config.special;
        made.segmented = segmenter(folder);
        made.types = new Types(folder.types(folder.config.text.target), made.special);
        made.reader = new Reader(await folder.session("text.onnx"));
        made.decoder = new Decoder(await folder.session("step.onnx"), folder.config.decoder_chunk);
        return made;
    }

    encode(text) {
        return this.types.encode(this.segmented.split(text));
    }

    /**
     * Parts of what follows a text, as they are found: {part}, and after each step {position, tokens, milliseconds}.
     *
     * `temperature` 0 takes the likeliest token each time; `topP` leaves as many of the likeliest tokens as have this
     * probability together. `random` gives numbers from 0 to 1.
     */
    async *stream(text, { maxTokens = 200, temperature = 1, topP = 1, random = Math.random } = {}) {
        const given = this.encode(text);
        const growing = new Growing(this, given, text);
        let written = 0;
        for await (const { token, ...step } of this.sample(given, maxTokens, temperature, topP, random)) {
            const part = token === this.special.eos ? "" : growing.add(token);
            written += token !== this.special.eos;
            yield { ...step, tokens: written };
            if (part !== "") yield { part };
        }
        if (growing.open !== "") yield { part: growing.open };
    }

    /** Tokens that follow others, with eos at the end if the text ends. */
    async *sample(tokens, maxTokens, temperature, topP, random) {
        const longest = this.config.limits.target;
        if (this.config.decoder_chunk === null && tokens.length + maxTokens > longest) {
            const length = tokens.length + maxTokens;
            throw new Error(`the text would have ${length} tokens and the model reads ${longest}; shorten it`);
        }
        const stream = [this.special.eos, ...tokens];
        const state = await this.reader.read(this.reader.start(), stream.slice(0, -1));
        let newest = stream.at(-1);
        this.decoder.start(1, 1, {}, { allTypes: true });
        this.decoder.goOn(state);
        for (let number = 0; number < maxTokens; number++) {
            const start = performance.now();
            const { logProbs } = await this.decoder.step([newest], [0]);
            newest = chosen(logProbs, this.special.pad, temperature, topP, random);
            yield { token: newest, position: this.decoder.position, milliseconds: performance.now() - start };
            if (newest === this.special.eos) return;
        }
    }

    text(tokens) {
        return this.segmented.join(this.types.decode(tokens));
    }
}

/** The text of tokens that come one by one after others. */
class Growing {
    constructor(model, given, text) {
        Object.assign(this, { model, near: given.slice(-NEAR), newest: [], open: "" });
        this.before = model.text(this.near);
        this.blank = endsInBlank(text) && !endsInBlank(this.before); // in the text, but in none of its tokens
    }

    /** What is new in the text, once no other token can change it. */
    add(token) {
        this.newest.push(token);
        const tokens = [...this.near, ...this.newest];
        this.open = this.model.text(tokens).slice(this.before.length);
        if (this.blank) this.open = strippedAtStart(this.open);
        const unfinished = this.open.endsWith("\ufffd"); // bytes of a character
        const found = unfinished ? this.open.slice(0, -1) : this.open;
        if (found !== "") {
            const open = this.open.slice(found.length);
            Object.assign(this, { near: tokens.slice(-NEAR), newest: [], open, blank: false });
            const near = this.model.text(this.near);
            this.before = unfinished ? near.slice(0, -1) : near;
        }
        return found;
    }
}

/** A token drawn from log-probabilities (V,). */
export function chosen(logProbs, pad, temperature, topP, random) {
    if (!logProbs.every(Number.isFinite)) {
        throw new Error("the model gives probabilities that are not numbers; export it again");
    }
    const order = Array.from(logProbs.keys()).filter((token) => token !== pad);
    order.sort((one, other) => logProbs[other] - logProbs[one]);
    if (temperature === 0) return order[0];
    const weights = order.map((token) => Math.exp((logProbs[token] - logProbs[order[0]]) / temperature));
    const total = weights.reduce((sum, weight) => sum + weight);
    let [count, kept] = [0, 0];
    while (count < order.length && kept < topP * total) kept += weights[count++];
    let left = random() * kept;
    for (let place = 0; place < count; place++) {
        left -= weights[place];
        if (left < 0) return order[place];
    }
    return order[count - 1];
}
