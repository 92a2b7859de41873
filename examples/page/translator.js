// Translation of lines and of documents, one source at a time.

import { Decoder } from "./decoder.js";
import { Folder, Integers, tensor } from "./folder.js";
import { LineRules, Places, split } from "./lines.js";
import { byWord, wordsOf } from "./looks.js";
import { Search } from "./search.js";
import { Types, segmenter } from "./text.js";

const BOS = "<s>"; // which fairseq leaves out of texts
const DEFAULTS = { beam: 5, lenpen: 1, min_len: 1, max_len_a: 0, max_len_b: 200, unkpen: 0 };

export class Translator {
    static async open(path, read) {
        const folder = await Folder.open(path, "translation model", read);
        const made = new Translator();
        const { text, special } = folder.config;
        made.config = folder.config;
        made.special = special;
        made.options = { ...DEFAULTS, ...folder.config.search };
        made.segmented = segmenter(folder);
        made.source = new Types(folder.types(text.source), special);
        made.target = new Types(folder.types(text.target), special);
        made.encoder = await folder.session("encoder.onnx");
        made.decoder = new Decoder(await folder.session("step.onnx"), folder.config.decoder_chunk);
        return made;
    }

    /**
     * Translates lines; blank ones stay blank, and for models of documents they end documents. Gives what is there:
     *
     *     {line, text}                             a line, with its number
     *     {position, tokens, milliseconds}         a step: tokens so far in this source and in all, and its time
     *     {lines, source, target, weights}         the words of some lines and of their translation, and where the
     *                                              latter look (target words, source words)
     */
    async *stream(texts, options = {}) {
        let tokens = 0;
        for (const { lines, source } of this.sources(texts)) {
            if (source.length === 1) {
                yield { line: lines[0], text: "" };
                continue;
            }
            let told = 0; // lines
            let unfinished = [];
            for await (const event of this.steps(source, options)) {
                if (event.hypotheses === undefined) {
                    const parts = split([...unfinished, ...event.settled], this.special.separator);
                    unfinished = parts.pop();
                    for (const part of parts) yield { line: lines[told++], text: this.text(part) };
                    tokens += 1;
                    yield { position: event.position, tokens, milliseconds: event.milliseconds };
                } else {
                    const [best] = event.hypotheses;
                    const found = split(best.tokens.slice(0, -1), this.special.separator);
                    for (; told < lines.length; told++) yield { line: lines[told], text: this.text(found[told]) };
                    if (best.looks !== null) yield { lines, ...this.picture(source, best) };
                }
            }
        }
    }

    /** All lines, translated. */
    async translate(texts, options = {}) {
        const found = texts.map(() => "");
        for await (const { line, text } of this.stream(texts, options)) if (line !== undefined) found[line] = text;
        return found;
    }

    // ---------------------------------------------------------------------------------------- sources

    /** The tokens of each source with eos, and the numbers of its lines: windows of documents, or single lines. */
    *sources(texts) {
        const encoded = texts.map((text, n) => this.encode(text, `line ${n + 1}`));
        const most = this.config.documents?.window_tokens;
        let lines = [];
        let length = 0;
        for (const [n, tokens] of encoded.entries()) {
            const blank = tokens.length === 1;
            if (lines.length > 0 && (blank || most === undefined || length + tokens.length > most)) {
                yield this.joined(lines, encoded);
                [lines, length] = [[], 0];
            }
            if (blank) yield { lines: [n], source: tokens };
            else {
                lines.push(n);
                length += tokens.length;
            }
        }
        if (lines.length > 0) yield this.joined(lines, encoded);
    }

    joined(lines, encoded) {
        const separator = this.config.documents?.source_separator;
        const tokens = lines.flatMap((n) => [...encoded[n].slice(0, -1), separator]);
        return { lines, source: [...tokens.slice(0, -1), this.special.eos] };
    }

    /** The tokens of a text, with eos; only eos if it is blank. */
    encode(text, name = "the text") {
        const tokens = [...this.source.encode(this.segmented.split(text)), this.special.eos];
        const longest = this.config.limits.source;
        if (tokens.length > longest) {
            const found = tokens.length;
            throw new Error(`${name} has ${found} tokens and the model reads ${longest}; cut it into sentences`);
        }
        const { documents } = this.config;
        if (documents && tokens.includes(documents.source_separator)) {
            throw new Error(`${name} has ${documents.separator}, which stands between lines; remove it`);
        }
        return tokens;
    }

    text(tokens) {
        return this.segmented.join(this.target.decode(tokens).filter((piece) => piece !== BOS));
    }

    picture(source, { tokens, looks }) {
        const { documents } = this.config;
        const read = wordsOf(source.slice(0, -1), this.source, this.segmented, documents?.source_separator);
        const written = wordsOf(tokens.slice(0, -1), this.target, this.segmented, this.special.separator);
        return { source: read.words, target: written.words, weights: byWord(looks, written, read) };
    }

    // ---------------------------------------------------------------------------------------- search

    /** The hypotheses of a source, tokens with eos, the best first. */
    async search(source, options = {}) {
        for await (const { hypotheses } of this.steps(source, options)) if (hypotheses !== undefined) return hypotheses;
    }

    /** After each step the tokens that are settled and the time, and in the end the hypotheses. */
    async *steps(source, given) {
        const options = { ...this.options, ...given };
        const { longest, lines } = this.limits(source, options);
        const search = new Search(longest, options, this.special, lines);
        const { inputs, places } = await this.inputs(source, options.beam);
        this.decoder.start(options.beam, search.candidates, inputs, { looks: true });
        const looks = []; // of each step, (b, m)
        for (let going = true; going; ) {
            const start = performance.now();
            places?.advance(search.tokens, search.parents, this.numbers);
            const found = await this.decoder.step(search.tokens, search.parents);
            going = search.step(found);
            looks.push(found.looks);
            yield { settled: search.settled(), position: search.number, milliseconds: performance.now() - start };
        }
        const width = source.length;
        const seen = ({ rows }) => rows.map((row, step) => looks[step].subarray(row * width, (row + 1) * width));
        const found = search.hypotheses();
        yield { hypotheses: found.map((each) => ({ ...each, looks: this.decoder.looks ? seen(each) : null })) };
    }

    /** The most tokens of a translation, and the rules of its lines. */
    limits(source, options) {
        const { documents } = this.config;
        const limit = this.config.limits.target - 1;
        if (documents === null) {
            const longest = Math.min(Math.trunc(options.max_len_a * source.length + options.max_len_b), limit);
            return { longest, lines: null };
        }
        const separators = [documents.source_separator, this.special.separator];
        const lengths = [documents.line_length_a, documents.line_length_b];
        const lines = new LineRules(source, ...separators, ...lengths, limit, options.beam);
        return { longest: lines.limit, lines };
    }

    /** What all steps read of their source, and what changes it for models that attend by line. */
    async inputs(source, beams) {
        const length = source.length;
        const tokens = tensor(Integers.of(...source), 1, length);
        const found = await this.encoder.run({ tokens, real: tensor(new Float32Array(length).fill(1), 1, length) });
        if (this.config.places === null) {
            return { inputs: { ...found, source_mask: tensor(new Float32Array(length), 1, 1, length) }, places: null };
        }
        this.numbers = new Integers(beams * length);
        const inputs = { ...found, source_places: tensor(this.numbers, 1, beams, length) };
        return { inputs, places: new Places(source, this.config.places, beams) };
    }
}
