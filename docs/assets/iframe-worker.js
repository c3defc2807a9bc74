// Browsers refuse workers on pages that are opened from a disk (file://). There, search runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.scope = frame.contentWindow
      this.scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      this.scope.importScripts = async (...urls) => { for (const each of urls) await this.load(each) }
      this.loaded = this.load(url)
    }

    load(url) {
      const script = Object.assign(this.scope.document.createElement("script"), { src: url, async: false })
      const loaded = new Promise((resolve, reject) => Object.assign(script, { onload: resolve, onerror: reject }))
      this.scope.document.head.append(script)
      return loaded
    }

    async postMessage(data) {
      await this.loaded
      this.scope.dispatchEvent(new this.scope.MessageEvent("message", { data }))
    }

    terminate() { this.scope.frameElement.remove() }
  }
}
