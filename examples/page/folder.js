// Reads what `mega-fairseq export` wrote: config.json, the graphs, their weights and the types.

import * as ort from "./ort/ort.wasm.min.mjs";

ort.env.wasm.numThreads = 1; // the models are small: several threads would wait for each other
ort.env.logLevel = "error";

const FORMAT = 1; // the newest format of a folder that this page reads

/** A folder that cannot be used: one sentence with what to do. */
export class FolderError extends Error {}

/** The bytes of a file on the server. */
export async function download(path) {
    let answer;
    try {
        answer = await fetch(path);
    } catch {
        throw new FolderError(`${path} cannot be read (the server does not answer); run make page again`);
    }
    if (!answer.ok) {
        throw new FolderError(`${path} cannot be read (${answer.statusText}); copy the folder again`);
    }
    return new Uint8Array(await answer.arrayBuffer());
}

/** An exported model: `config`, and its other files by name in `files`. */
export class Folder {
    constructor(path, config, files) {
        Object.assign(this, { path, config, files });
    }

    /** `read` gives the bytes of a path. */
    static async open(path, kind, read = download) {
        const config = await parsed(path, await read(`${path}/config.json`), kind);
        const names = Object.keys(config.files);
        const contents = await Promise.all(names.map((name) => read(`${path}/${name}`)));
        for (const [number, name] of names.entries()) {
            if ((await digest(contents[number])) !== config.files[name]) {
                throw new FolderError(`${path}/${name} is incomplete or was changed; copy the folder again`);
            }
        }
        return new Folder(path, config, Object.fromEntries(names.map((name, number) => [name, contents[number]])));
    }

    /** The types of a dictionary, by number. */
    types(name) {
        return new TextDecoder("utf-8", { ignoreBOM: true }).decode(this.files[name]).split("\n").slice(0, -1);
    }

    session(name) {
        const weights = { path: "weights.bin", data: this.files["weights.bin"] };
        return ort.InferenceSession.create(this.files[name], { externalData: [weights], executionProviders: ["wasm"] });
    }
}

async function parsed(path, bytes, kind) {
    let text, config;
    try {
        text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
        config = JSON.parse(text);
        if (!Number.isInteger(config.format) || typeof config.kind !== "string") throw new TypeError();
    } catch {
        throw new FolderError(`${path}/config.json is damaged; copy the folder again`);
    }
    if (config.format > FORMAT) {
        throw new FolderError(`${path} has format ${config.format} and this page reads ${FORMAT}; take a newer page`);
    }
    const { checksum } = config; // of the file without it; earlier versions wrote none
    if (checksum && (await digest(new TextEncoder().encode(text.replace(checksum, "")))) !== checksum) {
        throw new FolderError(`${path}/config.json is incomplete or was changed; copy the folder again`);
    }
    if (config.kind !== kind) {
        throw new FolderError(`${path} contains a ${config.kind}; this panel is for a ${kind}`);
    }
    return config;
}

async function digest(bytes) {
    const found = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
    return Array.from(found, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

// ------------------------------------------------------------------------------------------- arrays of a graph

/** Whole numbers from 0 as graphs read them, in 64 bits; written as 32, since BigInts are slow. */
export class Integers {
    constructor(length) {
        this.wide = new BigInt64Array(length);
        this.low = new Int32Array(this.wide.buffer);
    }

    static of(...numbers) {
        const made = new Integers(numbers.length);
        numbers.forEach((number, place) => made.set(place, number));
        return made;
    }

    set(place, number) {
        this.low[2 * place] = number;
    }
}

/** An array as the input of a graph. */
export function tensor(array, ...shape) {
    return array instanceof Integers
        ? new ort.Tensor("int64", array.wide, shape)
        : new ort.Tensor("float32", array, shape);
}

/** The numbers of an output of whole numbers. */
export function integers(output) {
    return Array.from(output.data, Number);
}

/** The shapes of a session's inputs or outputs by name; sizes that vary are strings. */
export function shapes(metadata) {
    return Object.fromEntries(metadata.map((each) => [each.name, each.shape]));
}
