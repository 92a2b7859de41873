// Texts of several lines: as many lines out as in, and cross attention that depends on the lines of both sides.
//
// A place is the number of a token's line and its offset in it.

import { NEVER } from "./search.js";

/** Tokens as lines. */
export function split(tokens, separator) {
    const lines = [[]];
    for (const token of tokens) {
        if (token === separator) lines.push([]);
        else lines.at(-1).push(token);
    }
    return lines;
}

const clipped = (number, least, most) => Math.min(Math.max(number, least), most);

/** Which tokens a sentence may still take if its hypotheses are to have the lines of the source. */
export class LineRules {
    /** Each line has at most a n + b tokens for n of the source, and a hypothesis at most `limit` before eos. */
    constructor(source, sourceSeparator, separator, a, b, limit, beams) {
        const lengths = split(source.slice(0, -1), sourceSeparator).map((line) => line.length); // without eos
        this.longest = lengths.map((n) => Math.max(1, Math.trunc(a * n + b))).reverse(); // the last line first
        const whole = this.longest.reduce((sum, n) => sum + n + 1, -1);
        this.limit = Math.min(whole, limit);
        if (2 * lengths.length - 1 > limit) {
            throw new Error(
                `a source has ${lengths.length} lines and the model writes ${limit} tokens; give shorter windows`,
            );
        }
        this.left = Array.from({ length: beams }, () => lengths.length - 1); // separators to write
        this.length = this.left.map(() => 0); // tokens of the unfinished line
        this.separator = separator;
    }

    /** Whether the line of a row must end; each further line takes one token and its end, at least. */
    full(row, number) {
        const left = this.left[row];
        return this.length[row] >= this.longest[Math.max(left, 0)] || 2 * left >= this.limit - number;
    }

    /** Excludes eos, unknown and the separator from the scores of these. */
    apply(scores, row, number) {
        const [blank, last] = [this.length[row] === 0, this.left[row] <= 0];
        if (blank || !last) scores[0] = NEVER;
        if (this.full(row, number)) scores[1] = NEVER;
        if (blank || last) scores[2] = NEVER;
    }

    advance(tokens, parents) {
        const isNew = tokens.map((token) => token === this.separator);
        this.left = parents.map((parent, row) => this.left[parent] - (isNew[row] ? 1 : 0));
        this.length = parents.map((parent, row) => (isNew[row] ? 0 : this.length[parent] + 1));
    }
}

/**
 * Where target and source tokens are, for cross attention by line: the bias of each pair, as a number in a table.
 *
 * The table has a row of distances of offsets for each distance of lines, and one last number for what is hidden.
 */
export class Places {
    /** `table` is that of config.json. */
    constructor(tokens, table, beams) {
        this.table = table;
        let [line, start] = [0, 0];
        this.source = tokens.map((_, n) => {
            if (n > 0 && tokens[n - 1] === table.source_separator) {
                line += 1;
                start = table.within_lines ? n : 0;
            }
            return { line, offset: n - start };
        });
        this.line = Array.from({ length: beams }, () => 0); // of the newest token of each row
        this.offset = this.line.map(() => -1); // before the first one
    }

    /** Writes the numbers (b, m) for the next tokens; lines beyond the last of the source count as it. */
    advance(tokens, parents, numbers) {
        const { target_separator, within_lines, window, near, width, first } = this.table;
        const starts = tokens.map((token) => token === target_separator);
        const last = this.source.at(-1).line;
        this.line = parents.map((parent, row) => Math.min(this.line[parent] + (starts[row] ? 1 : 0), last));
        this.offset = parents.map((parent, row) => (within_lines && starts[row] ? 0 : this.offset[parent] + 1));
        const hidden = (2 * near + 1) * width;
        for (let row = 0, place = 0; row < tokens.length; row++) {
            for (const { line, offset } of this.source) {
                const distance = line - this.line[row];
                const column = clipped(offset - this.offset[row] - first, 0, width - 1);
                const number = (clipped(distance, -near, near) + near) * width + column;
                numbers.set(place++, window !== null && Math.abs(distance) > window ? hidden : number);
            }
        }
    }
}
