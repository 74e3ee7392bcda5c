package keytail.harness;

import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.IOException;
import java.util.ArrayDeque;
import java.util.Comparator;
import java.util.Deque;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.apache.kafka.common.message.FetchResponseData.AbortedTransaction;
import org.apache.kafka.common.record.internal.ControlRecordType;
import org.apache.kafka.common.record.internal.Record;
import org.apache.kafka.common.record.internal.RecordBatch;
import org.apache.kafka.server.storage.log.FetchIsolation;
import org.apache.kafka.storage.internals.log.AbortedTxn;
import org.apache.kafka.storage.internals.log.FetchDataInfo;
import org.apache.kafka.storage.internals.log.ProducerStateEntry;
import org.apache.kafka.storage.internals.log.UnifiedLog;

/** The producers and transactions of an open log, and the records that a read_committed consumer reads from it. */
final class Served {
    private static final int FETCH_BYTES = 1_000;

    private Served() {
    }

    static void describe(UnifiedLog log, ObjectNode answer) throws IOException {
        ArrayNode producers = answer.putArray("producers");
        Map<Long, Integer> sequences = log.activeProducersWithLastSequence();
        log.producerStateManager().activeProducers().values().stream()
            .sorted(Comparator.comparingLong(ProducerStateEntry::producerId))
            .forEach(entry -> producers.addArray()
                .add(entry.producerId()).add(entry.producerEpoch()).add(sequences.get(entry.producerId()))
                .add(entry.firstDataOffset()).add(entry.lastDataOffset()).add(entry.lastTimestamp())
                .add(entry.coordinatorEpoch())
                .add(entry.currentTxnFirstOffset().orElse(-1)));
        ArrayNode aborted = answer.putArray("aborted");
        for (AbortedTxn entry : log.collectAbortedTransactions(log.logStartOffset(), log.logEndOffset())) {
            aborted.addArray()
                .add(entry.producerId()).add(entry.firstOffset()).add(entry.lastOffset()).add(entry.lastStableOffset());
        }
        committed(log, answer.putArray("committed"));
    }

    /** Fetches up to the last stable offset, each with its aborted transactions. */
    private static void committed(UnifiedLog log, ArrayNode offsets) throws IOException {
        long from = log.logStartOffset();
        while (from < log.lastStableOffset()) {
            FetchDataInfo fetched = log.read(from, FETCH_BYTES, FetchIsolation.TXN_COMMITTED, true);
            Deque<AbortedTransaction> aborted = new ArrayDeque<>(fetched.abortedTransactions.orElse(List.of()).stream()
                .sorted(Comparator.comparingLong(AbortedTransaction::firstOffset)).toList());
            Set<Long> abortedProducers = new HashSet<>();
            long next = from;
            for (RecordBatch batch : fetched.records.batches()) {
                take(batch, from, aborted, abortedProducers, offsets);
                next = batch.nextOffset();
            }
            if (next <= from) {
                return;
            }
            from = next;
        }
    }

    /** Reads one batch as a consumer does: data of aborted transactions is skipped. */
    private static void take(
            RecordBatch batch, long from, Deque<AbortedTransaction> aborted, Set<Long> producers, ArrayNode offsets) {
        while (!aborted.isEmpty() && aborted.peek().firstOffset() <= batch.lastOffset()) {
            producers.add(aborted.poll().producerId());
        }
        if (batch.isControlBatch()) {
            for (Record record : batch) {
                if (ControlRecordType.parse(record.key()) == ControlRecordType.ABORT) {
                    producers.remove(batch.producerId());
                }
                break;
            }
        } else if (!batch.isTransactional() || !producers.contains(batch.producerId())) {
            for (Record record : batch) {
                if (record.offset() >= from) {
                    offsets.add(record.offset());
                }
            }
        }
    }
}
