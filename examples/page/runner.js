// The page's side of worker.js.

export class Runner {
    /** A worker for the models of one kind. */
    constructor(kind) {
        this.kind = kind;
        this.waiting = new Map(); // what is done with the answers to each request
        this.newest = 0;
        this.start();
    }

    start() {
        this.failure = null; // why there is no worker
        this.worker = new Worker("worker.js", { type: "module" });
        this.worker.onmessage = ({ data }) => this.answered(data);
        this.worker.onerror = () => this.failed("the page's programs cannot be loaded; run make page again");
    }

    answered({ id, event, ended, error }) {
        const { onEvent, resolve, reject } = this.waiting.get(id);
        if (event !== undefined && id === this.newest) onEvent(event);
        if (event === undefined) this.waiting.delete(id);
        if (ended !== undefined) resolve(ended);
        if (error !== undefined) reject(new Error(error));
    }

    failed(message) {
        this.failure = new Error(message);
        for (const { reject } of this.waiting.values()) reject(this.failure);
        this.waiting.clear();
    }

    /** Stops the request before, if there is one; gives whether this one came to its end. */
    run(path, input, options, onEvent) {
        this.stop();
        const id = this.newest;
        if (this.failure !== null) this.start(); // the server may be there again
        return new Promise((resolve, reject) => {
            this.waiting.set(id, { onEvent, resolve, reject });
            this.worker.postMessage({ id, kind: this.kind, path, input, options });
        });
    }

    /** Stops the newest request, from which no more events come. */
    stop() {
        this.worker.postMessage({ stop: this.newest++ });
    }
}
