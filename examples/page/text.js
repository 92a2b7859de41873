// Text to the numbers of types, and back, as in mega_runtime/text.py.

import { Pieces } from "./pieces.js";

const SPACE = "\u2581"; // SentencePiece's
const BLANKS = /[\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+/; // those of Python
const AT_START = new RegExp(`^${BLANKS.source}`);
const AT_ENDS = new RegExp(`^${BLANKS.source}|${BLANKS.source}$`, "g");

export const endsInBlank = (text) => BLANKS.test(text.slice(-1));
export const strippedAtStart = (text) => text.replace(AT_START, "");
export const stripped = (text) => text.replace(AT_ENDS, "");
const words = (text) => stripped(text).split(BLANKS).filter((word) => word !== "");

/** Text that is segmented already: types separated by blanks. */
class Words {
    split(text) {
        return words(text);
    }

    join(types) {
        return types.join(" ");
    }

    /** Whether a type begins a word. */
    begins() {
        return true;
    }
}

/** Pieces of a SentencePiece model, as fairseq's --bpe sentencepiece makes them. */
class SentencePieces {
    constructor(bytes) {
        this.model = new Pieces(bytes);
    }

    split(text) {
        return words(this.model.encode(text).join(" "));
    }

    join(types) {
        return stripped(types.join("").replaceAll(SPACE, " "));
    }

    begins(type) {
        return type.startsWith(SPACE);
    }
}

/** The numbers of UTF-8 bytes, as mega_fairseq's --bpe byte_numbers makes them. */
class Bytes {
    split(text) {
        return Array.from(new TextEncoder().encode(text), String);
    }

    /** Types that are not numbers and bytes that are not UTF-8 become replacement characters. */
    join(types) {
        const bytes = types.map((type) => (/^\d+$/.test(type) && Number(type) < 256 ? Number(type) : 0xff));
        return new TextDecoder("utf-8", { ignoreBOM: true }).decode(Uint8Array.from(bytes));
    }
}

/** How a model's text becomes types. */
export function segmenter(folder) {
    const { kind } = folder.config.text;
    if (kind === "pieces") return new SentencePieces(folder.files["pieces.model"]);
    return kind === "bytes" ? new Bytes() : new Words();
}

/** The types of a dictionary, by number. */
export class Types {
    constructor(types, { unk, pad }) {
        Object.assign(this, { types, unk, pad });
        this.numbers = new Map(types.map((type, number) => [type, number]));
    }

    encode(types) {
        const numbers = types.map((type) => this.numbers.get(type) ?? this.unk);
        if (numbers.includes(this.pad)) throw new Error(`the text has the word ${this.types[this.pad]}; remove it`);
        return numbers;
    }

    decode(numbers) {
        return numbers.map((number) => this.types[number]);
    }
}
