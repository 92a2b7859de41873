// SentencePiece: text to the pieces of a model, unigram or BPE.
//
// The file is a protocol buffer: pieces (field 1) with text, score and type, settings of the training (2), and the
// normalisation of text (3), which has its rules as a trie.

const BPE = 2; // a type of models; the other one is unigram, 1
const NORMAL = 1; // types of pieces
const UNKNOWN = 2;
const CONTROL = 3;
const UNKNOWN_PENALTY = 10; // below the least score of a piece
const SPACE = "\u2581";
const decoder = new TextDecoder("utf-8", { ignoreBOM: true });

export class Pieces {
    constructor(bytes) {
        const model = fields(bytes);
        const training = fields(model.get(2)?.[0] ?? new Uint8Array());
        const normal = fields(model.get(3)?.[0] ?? new Uint8Array());
        const kind = number(training, 3, 1);
        if (kind > BPE) throw new Error("pieces.model is neither unigram nor BPE; train one of these");
        if (number(training, 24, 0) === 1) throw new Error("pieces.model has blanks behind words; train one with --treat_whitespace_as_suffix=false");
        this.rules = new Rules(normal.get(2)?.[0]);
        this.addsSpace = number(normal, 3, 1) === 1;
        this.collapses = number(normal, 4, 1) === 1;
        this.scores = new Map();
        for (const piece of model.get(1).map(fields)) {
            const type = number(piece, 3, NORMAL);
            if (type === UNKNOWN || type === CONTROL) continue; // text never becomes one
            if (type !== NORMAL) throw new Error("pieces.model has pieces of users or bytes; train one without");
            this.scores.set(decoder.decode(piece.get(1)[0]), piece.get(2)?.[0] ?? 0);
        }
        const texts = Array.from(this.scores.keys());
        this.longest = texts.reduce((most, text) => Math.max(most, Array.from(text).length), 0); // in characters
        const least = Array.from(this.scores.values()).reduce((one, other) => Math.min(one, other));
        this.unknown = Math.fround(least - UNKNOWN_PENALTY);
        // Unions within words do not depend on other words if no piece goes on behind a blank.
        const inWords = kind === BPE && !texts.some((text) => text.lastIndexOf(SPACE) > 0);
        this.unit = inWords ? new RegExp(`${SPACE}?[^${SPACE}]*`, "gu") : /.+/gsu;
        this.cut = kind === BPE ? this.merged : this.likeliest;
    }

    /** The pieces of a text; characters that no piece has, side by side, are one. */
    encode(text) {
        const found = [];
        let before = true; // whether the last piece is known
        for (const unit of this.normalised(text).match(this.unit) ?? []) {
            for (const piece of this.cut(Array.from(unit))) {
                const known = this.scores.has(piece);
                if (known || before) found.push(piece);
                else found.push(found.pop() + piece);
                before = known;
            }
        }
        return found;
    }

    /** Unigram: the pieces with the highest sum of scores. */
    likeliest(characters) {
        const ends = [{ score: 0 }]; // the best way to each place: its score, and where its last piece starts
        for (let start = 0; start < characters.length; start++) {
            const before = ends[start].score;
            const reach = Math.min(characters.length, start + this.longest);
            for (let end = start + 1, piece = ""; end <= reach; end++) {
                piece += characters[end - 1];
                const score = this.scores.get(piece) ?? (end === start + 1 ? this.unknown : undefined);
                if (score === undefined) continue;
                const sum = Math.fround(score + before);
                if (ends[end] === undefined || sum > ends[end].score) ends[end] = { score: sum, start };
            }
        }
        const found = [];
        for (let end = characters.length; end > 0; end = ends[end].start) {
            found.push(characters.slice(ends[end].start, end).join(""));
        }
        return found.reverse();
    }

    /** BPE: the neighbours whose union has the highest score become one piece, again and again. */
    merged(pieces) {
        const score = (n) => this.scores.get(pieces[n] + pieces[n + 1]) ?? -Infinity;
        const scores = Array.from(pieces.slice(1), (_, n) => score(n)); // of each piece and the next one
        for (;;) {
            let best = 0;
            for (let n = 1; n < scores.length; n++) if (scores[n] > scores[best]) best = n;
            if (!(scores[best] > -Infinity)) return pieces;
            pieces.splice(best, 2, pieces[best] + pieces[best + 1]);
            scores.splice(best, 1);
            if (best > 0) scores[best - 1] = score(best - 1);
            if (best < scores.length) scores[best] = score(best);
        }
    }

    /** The text after the rules, with single blanks as signs of their own. */
    normalised(text) {
        let found = this.rules.apply(text);
        if (this.collapses) found = found.replace(/ +/g, " ").replace(/^ /, "");
        if (text === "" || (this.collapses && found === "")) return "";
        found = (this.addsSpace ? SPACE : "") + found.replaceAll(" ", SPACE);
        return this.collapses ? found.replace(new RegExp(`${SPACE}+$`), "") : found;
    }
}

/** The rules of a normalisation: what the longest match at each place becomes. */
class Rules {
    /** The bytes of a trie, a double array, and behind it the replacements, which end with zeros. */
    constructor(bytes) {
        this.units = new Uint32Array();
        if (bytes === undefined || bytes.length === 0) return;
        const size = new DataView(bytes.buffer, bytes.byteOffset).getUint32(0, true);
        this.units = new Uint32Array(bytes.slice(4, 4 + size).buffer);
        this.replacements = bytes.subarray(4 + size);
    }

    apply(text) {
        const bytes = new TextEncoder().encode(text);
        const found = [];
        for (let start = 0; start < bytes.length; ) {
            const { length, value } = this.longest(bytes, start);
            if (length > 0) {
                const end = this.replacements.indexOf(0, value);
                found.push(...this.replacements.subarray(value, end));
                start += length;
            } else {
                do found.push(bytes[start++]);
                while (start < bytes.length && (bytes[start] & 0xc0) === 0x80); // the rest of a character
            }
        }
        return decoder.decode(Uint8Array.from(found));
    }

    /** The longest key of the trie that the bytes from `start` on begin with. */
    longest(bytes, start) {
        let found = { length: 0, value: 0 };
        if (this.units.length === 0) return found;
        let node = offset(this.units[0]);
        for (let place = start; place < bytes.length; place++) {
            node ^= bytes[place];
            const unit = this.units[node];
            if (((unit & 0x800000ff) >>> 0) !== bytes[place]) break;
            node ^= offset(unit);
            if ((unit >>> 8) & 1) found = { length: place + 1 - start, value: this.units[node] & 0x7fffffff };
        }
        return found;
    }
}

/** How far the children of a unit are. */
function offset(unit) {
    return (unit >>> 10) << ((unit & 0x200) >>> 6);
}

// ------------------------------------------------------------------------------------------- protocol buffers

/** The values of a message by the number of their field: bytes, whole numbers or floats. */
function fields(bytes) {
    const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    const found = new Map();
    let place = 0;
    const varint = () => {
        let [value, shift, byte] = [0, 1, 0x80];
        while (byte & 0x80) {
            byte = bytes[place++];
            value += (byte & 0x7f) * shift;
            shift *= 128;
        }
        return value;
    };
    while (place < bytes.length) {
        const key = varint();
        let value;
        if ((key & 7) === 0) value = varint();
        else if ((key & 7) === 5) value = view.getFloat32(place, true);
        else if ((key & 7) === 1) value = view.getFloat64(place, true);
        else {
            const length = varint();
            value = bytes.subarray(place, place + length);
        }
        place += { 0: 0, 5: 4, 1: 8, 2: value.length }[key & 7];
        const field = Math.floor(key / 8);
        if (!found.has(field)) found.set(field, []);
        found.get(field).push(value);
    }
    return found;
}

/** The last whole number of a field. */
function number(message, field, missing) {
    return message.get(field)?.at(-1) ?? missing;
}
