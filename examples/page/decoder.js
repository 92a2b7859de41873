// Single tokens through the decoder, and the state of a search: a tree of tokens under a mask.
//
// All rows share one tree. A step appends the keys and values of its tokens as new places, and a mask says which places
// a row sees: those of the tokens that it continues. So nothing is copied when beams are reordered. When the storage is
// full, places that no row sees are dropped.

import { Integers, integers, shapes, tensor } from "./folder.js";

export const MASKED = Math.fround(-1e30);
const FREE = 24; // steps for which storage is free after places were dropped

/** The step graph of a model, for one search at a time: `start`, then `step` for each token. */
export class Decoder {
    constructor(session, chunk) {
        Object.assign(this, { session, chunk });
        const inputs = shapes(session.inputMetadata);
        const layers = Object.keys(inputs).filter((name) => name.startsWith("ema")).length;
        this.layers = Array.from({ length: layers }, (_, layer) => layer);
        this.ema = this.layers.map((layer) => inputs[`ema${layer}`].slice(1)); // [N, D] of each layer
        this.widths = this.layers.flatMap((layer) => [inputs[`keys${layer}`][2], inputs[`values${layer}`][2]]);
        this.types = shapes(session.outputMetadata).log_probs[1];
        this.seesLooks = session.outputNames.includes("looks");
    }

    // ---------------------------------------------------------------------------------------- a search

    /**
     * Begins before the first token of `beams` rows. `sources` are inputs for all steps. With `allTypes`, each step
     * also returns `logProbs` (b, V), and with `looks` the weights of cross attention in the last layer, (b, m).
     */
    start(beams, candidates, sources = {}, { allTypes = false, looks = false } = {}) {
        Object.assign(this, { beams, sources, allTypes, looks: looks && this.seesLooks });
        this.candidates = Math.min(candidates, this.types);
        this.position = this.used = 0;
        this.own = false; // whether the last places are those of the last step's tokens
        this.states = this.ema.map(([n, dim]) => tensor(new Float32Array(beams * n * dim), beams, n, dim));
        this.allocate(FREE * beams);
        const always = ["top", "top_types", "special"];
        const states = this.layers.flatMap((layer) => [`new_ema${layer}`, `new_key${layer}`, `new_value${layer}`]);
        const asked = [...(this.looks ? ["looks"] : []), ...(allTypes ? ["log_probs"] : [])];
        this.outputs = [...always, ...states, ...asked];
    }

    /** Puts all rows, after `start`, behind a text that was read. */
    goOn(state) {
        this.position = state.position;
        this.used = state.keys[0].dims[1];
        this.allocate(this.used + FREE * this.beams);
        for (const layer of this.layers) {
            const [n, dim] = this.ema[layer];
            const rows = new Float32Array(this.beams * n * dim);
            for (let row = 0; row < this.beams; row++) rows.set(state.ema[layer].data, row * n * dim);
            this.states[layer] = tensor(rows, this.beams, n, dim);
            this.trees[2 * layer].set(state.keys[layer].data);
            this.trees[2 * layer + 1].set(state.values[layer].data);
        }
        for (let row = 0; row < this.beams; row++) this.mask.fill(0, row * this.places, row * this.places + this.used);
        for (let place = 0; place < this.used; place++) this.at[place] = this.position - this.used + place;
    }

    /** The place of the next token in its chunk. */
    get place() {
        return this.chunk === null ? this.position : this.position % this.chunk;
    }

    /** The next token of each row, which continues row `parents` -> the log-probabilities of what may follow. */
    async step(tokens, parents) {
        const { beams, place } = this;
        if (place === 0) {
            this.used = 0;
            this.mask.fill(MASKED);
        } else if (this.own) {
            this.follow(parents);
        }
        if (this.used + beams > this.places) this.dropUnseen();
        const found = await this.session.run(this.inputs(tokens, parents), this.outputs);
        this.states = this.layers.map((layer) => found[`new_ema${layer}`]);
        this.position += 1;
        this.own = this.place > 0;
        if (this.own) this.append(found); // no later token sees the last one of a chunk
        return {
            top: found.top.data, // (b, k)
            types: integers(found.top_types), // (b, k)
            special: found.special.data, // (b, s), in the order of the exporter
            logProbs: this.allTypes ? found.log_probs.data : null,
            looks: this.looks ? found.looks.data : null,
        };
    }

    /** A row sees what its parent saw, and the parent's own token. */
    follow(parents) {
        const before = this.mask.slice();
        const last = this.used - this.beams;
        parents.forEach((parent, row) => {
            const start = row * this.places;
            this.mask.set(before.subarray(parent * this.places, (parent + 1) * this.places), start);
            this.mask[start + last + parent] = 0;
        });
    }

    inputs(tokens, parents) {
        const { beams, places, position, place } = this;
        const distance = new Integers(places);
        this.at.forEach((at, n) => distance.set(n, Math.min(Math.max(position - at, 0), place)));
        const inputs = {
            tokens: tensor(Integers.of(...tokens), beams),
            order: tensor(Integers.of(...parents), beams),
            mask: tensor(this.mask, 1, beams, places),
            distance: tensor(distance, 1, places),
            place: tensor(Integers.of(place), 1),
            position: tensor(Integers.of(position), 1),
            k: tensor(Integers.of(this.candidates), 1),
            ...this.sources,
        };
        for (const layer of this.layers) {
            const [keys, values] = [2 * layer, 2 * layer + 1];
            inputs[`ema${layer}`] = this.states[layer];
            inputs[`keys${layer}`] = tensor(this.trees[keys], 1, places, this.widths[keys]);
            inputs[`values${layer}`] = tensor(this.trees[values], 1, places, this.widths[values]);
        }
        return Object.fromEntries(this.session.inputNames.map((name) => [name, inputs[name]]));
    }

    append(found) {
        for (const layer of this.layers) {
            this.trees[2 * layer].set(found[`new_key${layer}`].data, this.used * this.widths[2 * layer]);
            this.trees[2 * layer + 1].set(found[`new_value${layer}`].data, this.used * this.widths[2 * layer + 1]);
        }
        this.at.fill(this.position - 1, this.used, this.used + this.beams);
        this.used += this.beams;
    }

    // ---------------------------------------------------------------------------------------- storage

    allocate(places) {
        this.places = places;
        this.trees = this.widths.map((width) => new Float32Array(places * width)); // keys and values of each layer
        this.mask = new Float32Array(this.beams * places).fill(MASKED);
        this.at = new Int32Array(places); // the position of each place
    }

    /** Moves the places that any row sees into new storage, with free storage for more. */
    dropUnseen() {
        const { trees, mask, at, places, beams } = this;
        const rows = Array.from({ length: beams }, (_, row) => row);
        const seen = Array.from(at.keys()).filter((place) => rows.some((row) => mask[row * places + place] === 0));
        this.allocate(seen.length + FREE * beams);
        seen.forEach((place, now) => {
            this.widths.forEach((width, tree) => {
                this.trees[tree].set(trees[tree].subarray(place * width, (place + 1) * width), now * width);
            });
            for (const row of rows) this.mask[row * this.places + now] = mask[row * places + place];
            this.at[now] = at[place];
        });
        this.used = seen.length;
    }
}
