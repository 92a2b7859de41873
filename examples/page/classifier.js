// Classifiers of rows of numbers.

import { Folder, tensor } from "./folder.js";

const SCALES = { uint8: 255, int16: 32768, float: 1 }; // numbers of a file are divided by it

export class Classifier {
    static async open(path, read) {
        const folder = await Folder.open(path, "classifier", read);
        const { inputs } = folder.config;
        if (inputs.kind !== "values" || inputs.pairs) {
            throw new Error(`${path} classifies ${inputs.pairs ? "pairs" : inputs.kind}; give a classifier of values`);
        }
        const made = new Classifier();
        made.config = folder.config;
        made.encoder = await folder.session("encoder.onnx");
        return made;
    }

    async *stream(numbers) {
        yield { probabilities: await this.predict(numbers) };
    }

    /** The probability of each class, by label. */
    async predict(numbers) {
        const { length, number_type, mean, deviation } = this.config.inputs;
        if (length !== null && numbers.length !== length) {
            const found = numbers.length;
            throw new Error(`the input has ${found} numbers and those of the training ${length}; give as many`);
        }
        const centre = Math.fround(mean);
        const scaled = Float32Array.from(numbers, (number) =>
            Math.fround(Math.fround(Math.fround(number / SCALES[number_type]) - centre) / Math.fround(deviation)),
        );
        const real = new Float32Array(scaled.length).fill(1);
        const inputs = { inputs: tensor(scaled, 1, scaled.length), real: tensor(real, 1, real.length) };
        const { scores } = await this.encoder.run(inputs, ["scores"]);
        const most = Math.max(...scores.data);
        const weights = Array.from(scores.data, (score) => Math.exp(score - most));
        const total = weights.reduce((sum, weight) => sum + weight);
        return Object.fromEntries(this.config.classes.map((label, n) => [label, weights[n] / total]));
    }
}
