// Beam search over the likeliest tokens of each row, as in mega_runtime/search.py, for one sentence.
//
// Of the best 2 b candidates those that end among the first b become hypotheses, the first b others go on, and a
// sentence with b hypotheses is done. Each step records which beam every beam continues, and `hypotheses` follows these
// records back in the end. Sums are in float32, so that ties fall as they do there.

export const NEVER = -Infinity;

/** The types whose log-probabilities a step returns in any case. */
export function asked(special) {
    return [special.eos, special.unk, ...(special.separator === undefined ? [] : [special.separator])];
}

export class Search {
    /** A sentence has at most `longest` tokens before eos. `lines` are its LineRules, or null. */
    constructor(longest, options, special, lines = null) {
        const rows = Array.from({ length: options.beam }, (_, row) => row);
        Object.assign(this, { longest, options, special, lines, rows });
        this.asked = asked(special);
        this.hidden = new Set([special.pad, ...this.asked]);
        this.tokens = rows.map(() => special.eos); // the newest ones
        this.parents = rows; // the beams that they continue
        this.totals = rows.map(() => 0);
        this.closed = rows.map(() => false);
        this.number = 0; // of the next step
        this.ends = []; // the step, the beam that ends, and its total
        this.records = []; // tokens and parents of each step
        this.told = 0; // tokens that `settled` has returned
    }

    /** How many tokens of each row are needed: 2 b besides special ones. */
    get candidates() {
        return 2 * this.options.beam + this.asked.length + 1;
    }

    /** Chooses the next tokens; returns whether the search goes on. */
    step(found) {
        const beams = this.options.beam;
        const width = found.top.length / beams;
        if (this.rows.some((row) => !Number.isFinite(found.top[row * width]))) {
            throw new Error("the model gives probabilities that are not numbers; export it again");
        }
        const last = this.number >= this.longest;
        const best = this.scored(found, width, last).slice(0, 2 * beams); // half of them may be eos
        const ends = best.map(({ token, score }) => token === this.special.eos && score !== NEVER);
        for (const row of this.rows.filter((row) => ends[row] && !this.closed[row])) {
            this.ends.push({ step: this.number, beam: best[row].parent, total: best[row].score });
        }
        for (const row of this.rows) ends[row] ||= this.closed[row];
        // The first b candidates that remain; if there are fewer, candidates that have ended fill the places.
        const order = Array.from(best.keys());
        const going = [...order.filter((n) => !ends[n]), ...order.filter((n) => ends[n])].slice(0, beams);
        const done = last || this.ends.length >= beams;
        this.closed = going.map((n) => ends[n] || done);
        this.tokens = going.map((n) => best[n].token);
        this.parents = going.map((n) => best[n].parent);
        this.totals = going.map((n) => best[n].score);
        this.records.push({ tokens: this.tokens, parents: this.parents });
        this.lines?.advance(this.tokens, this.parents);
        this.number += 1;
        return !done;
    }

    /** All candidates, the best first; at first, all beams are alike. */
    scored(found, width, last) {
        const rows = this.number === 0 ? [0] : this.rows;
        const candidates = rows.flatMap((row) => {
            const total = this.totals[row];
            const each = [...this.ordinary(found, row, width, last), ...this.specials(found, row, last)];
            return each.map(([token, score]) => ({ token, parent: row, score: Math.fround(score + total) }));
        });
        return candidates.sort((one, other) => (one.score === other.score ? 0 : one.score > other.score ? -1 : 1));
    }

    /** The likeliest types with their scores, without special ones. */
    ordinary(found, row, width, last) {
        const full = last || (this.lines?.full(row, this.number) ?? false);
        return Array.from({ length: width }, (_, n) => {
            const token = found.types[row * width + n];
            return [token, full || this.hidden.has(token) ? NEVER : found.top[row * width + n]];
        });
    }

    /** The scores of `asked`. */
    specials(found, row, last) {
        const scores = this.asked.map((_, n) => found.special[row * this.asked.length + n]);
        scores[1] = Math.fround(scores[1] - Math.fround(this.options.unkpen));
        if (last) scores.fill(NEVER, 1);
        else if (this.number < this.options.min_len) scores[0] = NEVER;
        this.lines?.apply(scores, row, this.number);
        return this.asked.map((token, n) => [token, scores[n]]);
    }

    /** The best hypotheses, sorted by score: tokens with eos, and for each token the row that chose it. */
    hypotheses() {
        const found = this.ends.slice(0, this.options.beam).map(({ step, beam, total }) => {
            const { tokens, rows } = this.path(0, step, beam);
            return {
                tokens: [...tokens, this.special.eos],
                rows: [...rows, beam],
                score: total / (step + 1) ** this.options.lenpen,
            };
        });
        return found.sort((one, other) => other.score - one.score);
    }

    /** The tokens that all hypotheses will share, without those that it returned before. */
    settled() {
        if (this.ends.length > 0) return []; // a hypothesis of its own
        let step = this.records.length;
        let beams = new Set(this.rows.filter((row) => !this.closed[row] && this.totals[row] !== NEVER));
        while (beams.size > 1 && step > this.told) {
            step -= 1;
            beams = new Set(Array.from(beams, (beam) => this.records[step].parents[beam]));
        }
        if (beams.size !== 1 || step <= this.told) return [];
        const { tokens } = this.path(this.told, step, ...beams);
        this.told = step;
        return tokens;
    }

    /** The tokens of the steps from `first` to before `stop` that lead to a beam, and the row that chose each. */
    path(first, stop, beam) {
        const [tokens, rows] = [[], []];
        for (let step = stop - 1; step >= first; step--) {
            tokens.push(this.records[step].tokens[beam]);
            beam = this.records[step].parents[beam];
            rows.push(beam);
        }
        return { tokens: tokens.reverse(), rows: rows.reverse() };
    }
}
